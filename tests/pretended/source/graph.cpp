// Graphs of launches: what is captured runs whenever it is replayed, on the same memory.
#include "runtime.h"

#include <ATen/core/GraphImplInterface.h>

#include <cstring>

namespace pretend {

namespace {

// The pool of a number; graphs of one pool share memory.
std::shared_ptr<Pool> pool_of(c10::MempoolId_t id) {
  static auto* known = new std::map<c10::MempoolId_t, std::weak_ptr<Pool>>;
  auto found = (*known)[id].lock();
  if (!found) (*known)[id] = found = std::make_shared<Pool>();
  return found;
}

struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override { leave(); }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    static std::atomic<uint64_t> next{1};
    TORCH_CHECK(!runtime().tape, "a stream is being captured already");
    TORCH_CHECK(!done_, "this graph has been captured");
    tape_.lane = current_lane(current_device());
    TORCH_CHECK(tape_.lane & 0xFFFFFFFF, "the default stream cannot be captured");
    id_ = pool.first || pool.second ? pool : c10::MempoolId_t{0, next++};
    tape_.pool = pool_of(id_);
    tape_.capture = ++tape_.pool->captures;
    runtime().tape = &tape_;
  }
  void capture_end() override {
    TORCH_CHECK(runtime().tape == &tape_, "this graph is not being captured");
    leave();
    for (const auto& tensor : tape_.made) {
      // Zero for whole numbers: a kernel that looks something up would fail on others.
      const int byte = at::isIntegralType(tensor.scalar_type(), true) ? 0 : 0xFF;
      const auto& storage = tensor.storage();
      if (storage.nbytes()) std::memset(const_cast<void*>(storage.data()), byte, storage.nbytes());
    }
    tape_.made.clear();
    done_ = true;
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(done_, "there is nothing to replay");
    begin_replay(tape_);
    auto lane = current_lane(current_device());
    auto clock = launch(lane, "graph");
    for (const auto& call : tape_.calls) call(lane, clock);
  }
  void reset() override {
    leave();
    tape_ = {};
    done_ = false;
  }
  c10::MempoolId_t pool() const override { return id_; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  void leave() {
    if (runtime().tape == &tape_) runtime().tape = nullptr;
  }
  Tape tape_;
  c10::MempoolId_t id_{0, 0};
  bool done_ = false;
};

[[maybe_unused]] const bool registered = [] {
  // Under the name that a device has once it is renamed.
  at::GraphImplRegistry()->Register(
      "PRETEND", [](at::GraphImplArgs args) -> std::unique_ptr<at::GraphImplInterface> {
        return std::make_unique<Graph>(args);
      });
  return true;
}();

}  // namespace

}  // namespace pretend
