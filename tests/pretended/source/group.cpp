// Exchange between processes whose devices are pretended: what NCCL allows, over gloo.
//
// Every operation, or group of them, is a set of messages to some of the other processes and from
// them. It runs on a stream of the communicator's own: it waits for the current stream when it is
// issued, and `wait` has the current stream wait for it. Until then what is received is NaN, and
// what is sent must not change.
//
// NCCL runs the operations of a communicator in the order in which they are issued, so two
// processes that issue them in different orders wait for one another for ever. Here each message
// to a peer comes with a header, which says what its sender has issued with that peer as its n-th
// operation: `wait` compares it with what this process has issued.
#include "runtime.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

namespace py = pybind11;

namespace pretend {
namespace {

using at::Tensor;
using c10d::Work;
using Messages = std::vector<std::pair<int, Tensor>>;  // with a peer; of a device

constexpr size_t MOST_IN_A_GROUP = 128;  // NCCL allows 2048, and hangs were seen with fewer
enum Header { NUMBER, KIND_OF, SENT, SENT_BYTES, SENT_LIKE, RECEIVED, RECEIVED_BYTES, RECEIVED_LIKE,
              FIELDS };

std::vector<int64_t> group_sizes;  // of all groups of this process, by the lock of the runtime

int tag_of(int64_t number, int64_t index, int64_t bytes) {
  uint64_t mixed = 1469598103934665603u;
  for (auto value : {number, index, bytes}) mixed = (mixed ^ uint64_t(value)) * 1099511628211u;
  return int((mixed >> 20) & 0x3FFFFFFF);
}

// What this process has with one peer in one operation.
struct Peer {
  int rank = 0;
  Tensor own, other;  // headers
  c10::intrusive_ptr<Work> header;
  std::vector<c10::intrusive_ptr<Work>> works;
};

struct Issued final : Work {
  std::string what;
  std::map<int, Peer> peers;
  std::vector<std::pair<Tensor, Tensor>> sent;      // in the device's memory, and as it was
  std::vector<std::pair<Tensor, Tensor>> received;  // in the device's memory, and what comes
  std::function<void()> finish;                     // with what came
  std::vector<Tensor> kept;                         // whatever happens to it outside
  std::vector<Tensor> results;
  std::shared_ptr<std::atomic<bool>> aborted;
  c10::intrusive_ptr<c10d::Backend> gloo;
  Clocks clocks;
  int device = 0;
  bool issued = false, done = false;

  explicit Issued(c10d::OpType type, std::string name) : Work(-1, type), what(std::move(name)) {}
  ~Issued() override {
    if (issued && !done && !*aborted) {
      report({"an operation was dropped before it was waited for: " + what});
    }
  }
  bool isCompleted() override { return done; }
  bool isSuccess() const override { return done; }
  void synchronize() override { wait(kNoTimeout); }
  // As DistributedDataParallel has it, which waits for it at the end of backward.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(c10::List<Tensor>(results));
    return future;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (done) return true;
    TORCH_CHECK(issued, "a group of operations is waited for before it is ended: ", what);
    for (auto& [rank, peer] : peers) {
      if (*aborted) C10_THROW_ERROR(DistBackendError, "the communicator was aborted: " + what);
      peer.header->wait(timeout);
      compare(peer);
      for (auto& work : peer.works) work->wait(timeout);
    }
    done = true;
    for (auto& [memory, before] : sent) {
      if (std::memcmp(memory.data_ptr(), before.data_ptr(), before.nbytes()) != 0) {
        report({"memory was changed while it was sent: " + what});
      }
    }
    for (auto& [memory, came] : received) memory.copy_(came);
    if (finish) finish();
    wait_for(current_lane(device), clocks);
    peers.clear();
    kept.clear();
    return true;
  }

  void compare(const Peer& peer) {
    auto* own = peer.own.data_ptr<int64_t>();
    auto* other = peer.other.data_ptr<int64_t>();
    bool same = own[KIND_OF] == other[KIND_OF];
    for (int field = 0; field < 3; field++) {
      same &= own[SENT + field] == other[RECEIVED + field];
      same &= own[RECEIVED + field] == other[SENT + field];
    }
    if (same) return;
    auto said = [](const int64_t* header) {
      return c10::str("sends ", header[SENT], " tensors of ", header[SENT_BYTES],
                      " bytes and receives ", header[RECEIVED], " of ", header[RECEIVED_BYTES],
                      " (kind ", header[KIND_OF], ")");
    };
    *aborted = true;
    // For good: gloo still waits for what never comes.
    new auto(gloo);
    new auto(peers);
    new auto(kept);
    auto text = c10::str("operations are issued in different orders: number ", own[NUMBER],
                         " with rank ", peer.rank, " here ", said(own), ", there ", said(other));
    report({text});
    C10_THROW_ERROR(DistBackendError, text);
  }
};

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank,
        int size)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "pretended-nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { *aborted_ = true; }
  void shutdown() override { *aborted_ = true; }

  void startCoalescing() override {
    group_ = c10::make_intrusive<Issued>(c10d::OpType::COALESCED, "a group of messages");
  }
  c10::intrusive_ptr<Work> endCoalescing() override {
    auto work = std::exchange(group_, nullptr);
    auto out = std::exchange(group_out_, {}), in = std::exchange(group_in_, {});
    auto count = out.size() + in.size();
    {
      Locked held(runtime().lock);
      group_sizes.push_back(int64_t(count));
    }
    TORCH_CHECK(count <= MOST_IN_A_GROUP, "a group of ", count, " operations: expected at most ",
                MOST_IN_A_GROUP);
    return count ? issue(work, out, in) : done(work);
  }
  c10::intrusive_ptr<Work> send(std::vector<Tensor>& tensors, int peer, int) override {
    if (!group_) return issue(made(c10d::OpType::SEND, "send"), {{peer, tensors.at(0)}}, {});
    group_out_.emplace_back(peer, tensors.at(0));
    return group_;
  }
  c10::intrusive_ptr<Work> recv(std::vector<Tensor>& tensors, int peer, int) override {
    if (!group_) return issue(made(c10d::OpType::RECV, "recv"), {}, {{peer, tensors.at(0)}});
    group_in_.emplace_back(peer, tensors.at(0));
    return group_;
  }

  c10::intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors,
                                     const c10d::BroadcastOptions& options) override {
    auto work = made(c10d::OpType::BROADCAST, "broadcast");
    int root = int(options.rootRank);
    if (root != rank_) return issue(work, {}, {{root, tensors.at(0)}});
    return issue(work, to_all(tensors.at(0)), {});
  }
  c10::intrusive_ptr<Work> allgather(std::vector<std::vector<Tensor>>& out,
                                     std::vector<Tensor>& in,
                                     const c10d::AllgatherOptions&) override {
    return gathered(made(c10d::OpType::ALLGATHER, "all_gather"), out.at(0), in.at(0));
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& in,
                                           const c10d::AllgatherOptions&) override {
    return gathered(made(c10d::OpType::ALLGATHER, "all_gather"),
                    out.view({size_, -1}).unbind(), in.view(-1));
  }
  c10::intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors,
                                     const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "only sums are known here");
    return reduced(made(c10d::OpType::ALLREDUCE, "all_reduce"), tensors.at(0));
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    c10::Device device(KIND, device_ < 0 ? current_device() : c10::DeviceIndex(device_));
    return reduced(made(c10d::OpType::BARRIER, "barrier"),
                   at::zeros({1}, at::TensorOptions(device)));
  }

 private:
  c10::intrusive_ptr<Issued> made(c10d::OpType type, const std::string& name) {
    TORCH_CHECK(!group_, "only messages go in groups here, not ", name);
    return c10::make_intrusive<Issued>(type, name);
  }
  c10::intrusive_ptr<Work> done(const c10::intrusive_ptr<Issued>& work) {
    work->done = true;
    return work;
  }
  Messages to_all(const Tensor& tensor) {
    Messages all;
    for (int peer = 0; peer < size_; peer++) {
      if (peer != rank_) all.emplace_back(peer, tensor);
    }
    return all;
  }

  c10::intrusive_ptr<Work> gathered(const c10::intrusive_ptr<Issued>& work,
                                    const std::vector<Tensor>& out, const Tensor& in,
                                    std::function<void()> then = [] {}) {
    Messages coming;
    for (int peer = 0; peer < size_; peer++) {
      if (peer != rank_) coming.emplace_back(peer, out.at(peer));
    }
    auto finish = [own = as_host(out.at(rank_)), in = as_host(in).clone(), then] {
      own.copy_(in);
      then();
    };
    return issue(work, to_all(in), coming, finish, {out.at(rank_), in});
  }

  // Adds in the order of the ranks.
  c10::intrusive_ptr<Work> reduced(const c10::intrusive_ptr<Issued>& work, const Tensor& out) {
    std::vector<Tensor> rooms;
    for (int rank = 0; rank < size_; rank++) rooms.push_back(at::empty_like(out));
    auto found = gathered(work, rooms, out, [rooms, own = as_host(out)] {
      own.copy_(as_host(rooms.at(0)));
      for (size_t rank = 1; rank < rooms.size(); rank++) own.add_(as_host(rooms.at(rank)));
    });
    std::memset(out.data_ptr(), 0xFF, out.nbytes());
    work->sent.clear();  // it is in place
    work->results = {out};
    return found;
  }

  void check(const Tensor& tensor) {
    if (tensor.device().type() != KIND) {
      TORCH_CHECK(false, "No backend type associated with device type ", tensor.device().type());
    }
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    if (device_ < 0) {
      device_ = tensor.get_device();
      lane_ = new_lane(device_);
      char host[256] = "";
      gethostname(host, sizeof host - 1);
      place_ = c10::str(host, " pretend:", device_);
      store_->set(c10::str("place/", rank_), place_);
    }
    TORCH_CHECK(tensor.get_device() == device_, "a tensor of ", tensor.device(),
                " in a communicator of pretend:", device_);
  }

  // The first time, see where the peer is.
  void meet(int peer) {
    TORCH_CHECK(peer != rank_, "a message to oneself");
    if (!met_.insert(peer).second) return;
    auto place = store_->get_to_str(c10::str("place/", peer));
    if (place == place_) {
      C10_THROW_ERROR(DistBackendError, c10::str("Duplicate GPU detected : rank ", rank_,
                      " and rank ", peer, " both on ", place));
    }
  }

  c10::intrusive_ptr<Work> issue(const c10::intrusive_ptr<Issued>& work, const Messages& out,
                                 const Messages& in, std::function<void()> finish = nullptr,
                                 std::vector<Tensor> kept = {}) {
    if (*aborted_) C10_THROW_ERROR(DistBackendError, "the communicator was aborted");
    for (const auto* messages : {&out, &in}) {
      for (const auto& [peer, tensor] : *messages) check(tensor);
    }
    for (const auto& tensor : kept) check(tensor);
    for (const auto* messages : {&out, &in}) {
      for (const auto& [peer, tensor] : *messages) meet(peer);
    }
    auto here = current_lane(device_);
    wait_for(lane_, moment_of(here));
    auto clock = launch(lane_, work->what);
    work->aborted = aborted_;
    work->gloo = gloo_;
    work->device = device_;
    work->finish = std::move(finish);
    for (const auto& tensor : kept) touch(tensor, lane_, clock, true, work->what);
    work->kept = std::move(kept);
    work->clocks = moment_of(lane_);

    auto peer_of = [&](int rank) -> Peer& {
      auto& peer = work->peers[rank];
      if (!peer.own.defined()) {
        peer.rank = rank;
        peer.own = at::zeros({FIELDS}, at::kLong);
        peer.other = at::zeros({FIELDS}, at::kLong);
        peer.own.data_ptr<int64_t>()[NUMBER] = numbers_[rank]++;
        peer.own.data_ptr<int64_t>()[KIND_OF] = kind_of(*work);
      }
      return peer;
    };
    auto note = [](Peer& peer, int first, const Tensor& tensor) {
      auto* header = peer.own.data_ptr<int64_t>();
      auto number = header[first]++;
      header[first + 1] += int64_t(tensor.nbytes());
      header[first + 2] = header[first + 2] * 31 + int64_t(tensor.nbytes());
      return tag_of(header[NUMBER], number, int64_t(tensor.nbytes()));
    };
    for (const auto& [rank, tensor] : out) {
      touch(tensor, lane_, clock, false, work->what);
      auto& peer = peer_of(rank);
      auto tag = note(peer, SENT, tensor);
      work->kept.push_back(tensor);
      auto memory = as_host(tensor), copy = memory.clone();
      work->sent.emplace_back(memory, copy);
      std::vector<Tensor> one{copy};
      if (copy.numel()) peer.works.push_back(gloo_->send(one, rank, tag));
    }
    for (const auto& [rank, tensor] : in) {
      touch(tensor, lane_, clock, true, work->what);
      auto& peer = peer_of(rank);
      auto tag = note(peer, RECEIVED, tensor);
      work->kept.push_back(tensor);
      auto memory = as_host(tensor), room = at::empty_like(memory);
      std::memset(memory.data_ptr(), 0xFF, memory.nbytes());
      work->received.emplace_back(memory, room);
      std::vector<Tensor> one{room};
      if (room.numel()) peer.works.push_back(gloo_->recv(one, rank, tag));
    }
    for (auto& [rank, peer] : work->peers) {
      auto tag = tag_of(peer.own.data_ptr<int64_t>()[NUMBER], -1, 0);
      std::vector<Tensor> own{peer.own}, other{peer.other};
      peer.works.push_back(gloo_->send(own, rank, tag));
      peer.header = gloo_->recv(other, rank, tag);
    }
    work->issued = true;
    if (work->peers.empty() && !work->finish) work->done = true;
    return work;
  }
  // Messages are of one kind, in a group or without.
  static int64_t kind_of(Issued& work) {
    auto type = work.retrieveOpType();
    bool message = type == c10d::OpType::SEND || type == c10d::OpType::RECV;
    return message ? int64_t(c10d::OpType::COALESCED) : int64_t(type);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  c10::intrusive_ptr<Issued> group_;
  Messages group_out_, group_in_;
  std::map<int, int64_t> numbers_;
  std::set<int> met_;
  std::string place_;
  int device_ = -1;
  Lane lane_ = 0;
};

}  // namespace

void bind_group(py::module_& module) {
  py::module_::import("torch.distributed");  // which knows the classes that these are made of
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(module, "Group")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
                       int rank, int size) {
        return c10::make_intrusive<Group>(std::move(gloo), std::move(store), rank, size);
      }));
  module.def("group_sizes", [] {
    Locked held(runtime().lock);
    return std::exchange(group_sizes, {});
  });
}

}  // namespace pretend
