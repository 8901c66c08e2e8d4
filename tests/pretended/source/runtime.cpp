// Devices, streams, events, memory and generators of the pretended accelerator.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include <unistd.h>

namespace pretend {

Runtime& runtime() {
  static auto* found = new Runtime;  // outlives whatever is freed at the end of the process
  return *found;
}

// ---------------------------------------------------------------- streams, and who has waited

namespace {

thread_local c10::DeviceIndex device_here = 0;
thread_local std::array<c10::StreamId, MOST_DEVICES> stream_here{};
std::atomic<c10::StreamId> next_stream{1};
constexpr int STREAM_BITS = 32;

void merge(Clocks& into, const Clocks& other) {
  for (const auto& [lane, clock] : other) {
    auto& known = into[lane];
    known = std::max(known, clock);
  }
}

bool knows(const Clocks& clocks, Lane lane, int64_t clock) {
  auto found = clocks.find(lane);
  return found != clocks.end() && found->second >= clock;
}

std::string name_of(Lane lane) {
  auto stream = lane & ((Lane(1) << STREAM_BITS) - 1);
  return "stream " + std::to_string(stream) + " of pretend:" + std::to_string(lane >> STREAM_BITS);
}

void check_process() {
  TORCH_CHECK(runtime().process == getpid(), "pretended devices cannot be used in a forked process");
}

void check_device(int device) {
  TORCH_CHECK(device >= 0 && device < runtime().devices, "there is no device pretend:", device,
              ": there are ", runtime().devices);
}

}  // namespace

c10::DeviceIndex current_device() { return device_here; }

Lane lane_of(const c10::Stream& stream) {
  return (Lane(stream.device_index()) << STREAM_BITS) | stream.id();
}

Lane current_lane(int device) { return (Lane(device) << STREAM_BITS) | stream_here.at(device); }

Lane new_lane(int device) { return (Lane(device) << STREAM_BITS) | next_stream++; }

int64_t launch(Lane lane, const std::string& what) {
  auto& all = runtime();
  check_process();
  Locked held(all.lock);
  if (all.tape && all.tape->lane == lane) return all.seen[lane][lane];  // nothing runs yet
  if (all.counts) all.watch("launch", what);
  auto& seen = all.seen[lane];
  // What the host has waited for was over before this was launched.
  merge(seen, all.host);
  return ++seen[lane];
}

void wait_for(Lane lane, const Clocks& clocks) {
  Locked held(runtime().lock);
  merge(runtime().seen[lane], clocks);
}

Clocks moment_of(Lane lane) {
  Locked held(runtime().lock);
  return runtime().seen[lane];
}

void count_wait(const std::string& what, bool asked_for) {
  auto& all = runtime();
  TORCH_CHECK(!all.tape, "operation not permitted when stream is capturing: ", what);
  TORCH_CHECK(asked_for || !all.waits_raise, "called a synchronizing operation: ", what);
  if (all.counts) all.watch("wait", what);
}

void host_waits(const Clocks& clocks) {
  auto& all = runtime();
  std::vector<Late> due;  // let go of without the lock
  std::vector<std::string> wrong;
  {
    Locked held(all.lock);
    merge(all.host, clocks);
    std::vector<Late> rest;
    for (auto& copy : all.late) {
      (knows(all.host, copy.lane, copy.clock) ? due : rest).push_back(std::move(copy));
    }
    all.late = std::move(rest);
    for (auto& copy : due) {
      if (copy.to_host) {
        std::memcpy(copy.at, copy.bytes.data(), copy.bytes.size());
      } else if (std::memcmp(copy.at, copy.bytes.data(), copy.bytes.size()) != 0) {
        wrong.push_back("pinned memory was changed before its copy to a device was waited for: " +
                        copy.by);
      }
    }
  }
  report(wrong);
}

void report(const std::vector<std::string>& what) {
  for (const auto& text : what) runtime().watch("report", text);
}

void note(const std::string& what) {
  Locked held(runtime().lock);
  runtime().reports.push_back(what);
  if (!runtime().log.empty()) std::ofstream(runtime().log, std::ios::app) << what << std::endl;
}

// ---------------------------------------------------------------- memory

namespace {

constexpr size_t ROUNDING = 512;

size_t rounded(size_t bytes) { return (bytes + ROUNDING - 1) / ROUNDING * ROUNDING; }

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  auto& all = runtime();
  if (all.process != getpid()) {
    note("memory of a device was freed in a forked process");
    return;
  }
  {
    Locked held(all.lock);
    all.blocks.erase(reinterpret_cast<uintptr_t>(block->address));
    if (auto pool = block->pool) {
      pool->freed.push_back(
          {block->address, block->bytes, block->device, block->of_host, pool->captures});
      delete block;
      return;
    }
    if (!block->pinned) {
      all.usage[block->device].bytes -= rounded(block->bytes);
      for (const auto& use : block->uses) {
        if (use.lane == block->home || block->recorded.count(use.lane)) continue;
        if (knows(all.host, use.lane, use.clock)) continue;
        if (knows(all.seen[block->home], use.lane, use.clock)) continue;
        note("memory of " + name_of(block->home) + " was freed while " +
                              name_of(use.lane) + " may use it (" + use.by +
                              "): record_stream, or wait");
      }
    }
  }
  if (!block->of_host) std::free(block->address);
  delete block;
}

void reserve(int device, size_t bytes) {
  auto& all = runtime();
  Locked held(all.lock);
  auto& usage = all.usage[device];
  if (bytes > size_t(all.limit_bytes) || usage.bytes + int64_t(rounded(bytes)) > all.limit_bytes) {
    C10_THROW_ERROR(OutOfMemoryError, "pretend:" + std::to_string(device) +
        " is out of memory. Tried to allocate " + std::to_string(bytes) + " bytes beside " +
        std::to_string(usage.bytes) + " of " + std::to_string(all.limit_bytes));
  }
  usage.bytes += rounded(bytes);
  usage.peak_bytes = std::max(usage.peak_bytes, usage.bytes);
  usage.allocations++;
}

c10::DataPtr keep(std::unique_ptr<Block> block) {
  auto device = block->pinned ? c10::Device(c10::kCPU) : c10::Device(KIND, block->device);
  auto* kept = block.release();
  Locked held(runtime().lock);
  static int64_t next = 1;
  kept->number = next++;
  auto* tape = runtime().tape;
  if (tape && !kept->pinned && tape->lane == kept->home) kept->pool = tape->pool;
  runtime().blocks[reinterpret_cast<uintptr_t>(kept->address)] = kept;
  return {kept->address, kept, &release, device};
}

c10::DataPtr allocate_on(size_t bytes, int device, bool pinned) {
  auto where = pinned ? c10::Device(c10::kCPU) : c10::Device(KIND, device);
  check_process();
  if (bytes == 0) return {nullptr, nullptr, &release, where};
  if (!pinned) reserve(device, bytes);
  auto block = std::make_unique<Block>();
  block->bytes = bytes;
  block->device = device;
  block->pinned = pinned;
  block->home = current_lane(device);
  block->address = std::aligned_alloc(ROUNDING, rounded(bytes));
  TORCH_CHECK(block->address, "the host is out of memory");
  std::memset(block->address, 0xFF, bytes);  // NaN: nothing may rely on what it finds
  return keep(std::move(block));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, device_here, false); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Locked held(runtime().lock);
    if (auto* block = static_cast<Block*>(pointer.get_context())) {
      block->recorded.insert(lane_of(stream));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked held(runtime().lock);
    const auto& usage = runtime().usage[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = usage.bytes;
      (*bytes)[0].peak = usage.peak_bytes;
    }
    stats.allocation[0].allocated = usage.allocations;
    stats.num_device_alloc = usage.allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Locked held(runtime().lock);
    runtime().usage[device].allocations = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked held(runtime().lock);
    runtime().usage[device].peak_bytes = runtime().usage[device].bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked held(runtime().lock);
    auto all = runtime().limit_bytes;
    return {size_t(all - runtime().usage[device].bytes), size_t(all)};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, 0, true); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(KIND, &device_memory)
REGISTER_HOST_ALLOCATOR(KIND, &pinned_memory)

bool overlap(const Use& one, const Use& other) {
  return one.first < other.end && other.first < one.end;
}

}  // namespace

c10::DeviceAllocator& allocator() { return device_memory; }
c10::Allocator& pinned_allocator() { return pinned_memory; }

const Block* block_at(const void* address) {
  Locked held(runtime().lock);
  auto number = reinterpret_cast<uintptr_t>(address);
  auto after = runtime().blocks.upper_bound(number);
  if (after == runtime().blocks.begin()) return nullptr;
  const auto* block = std::prev(after)->second;
  return number < std::prev(after)->first + block->bytes ? block : nullptr;
}

Block* block_of(const c10::Storage& storage) {
  if (storage.data_ptr().get_deleter() == &release) {
    return static_cast<Block*>(storage.data_ptr().get_context());
  }
  // A part of one that has come by DLPack.
  return const_cast<Block*>(block_at(storage.data()));
}

c10::Storage adopt(const c10::Storage& made, int device) {
  c10::DataPtr pointer(nullptr, nullptr, &release, c10::Device(KIND, device));
  if (made.nbytes()) {
    reserve(device, made.nbytes());
    auto block = std::make_unique<Block>();
    block->address = const_cast<void*>(made.data());
    block->bytes = made.nbytes();
    block->device = device;
    block->home = current_lane(device);
    block->of_host = made;
    pointer = keep(std::move(block));
  }
  return {c10::Storage::use_byte_size_t(), made.nbytes(), std::move(pointer), &device_memory, true};
}

int& Permitted::depth() {
  thread_local int found = 0;
  return found;
}

Pool::~Pool() {
  Locked held(runtime().lock);
  for (auto& each : freed) {
    runtime().usage[each.device].bytes -= rounded(each.bytes);
    if (!each.of_host) std::free(each.address);
  }
}

void note_use(Tape& tape, const at::Tensor& tensor) {
  Locked held(runtime().lock);
  auto* block = tensor.numel() ? block_of(tensor.storage()) : nullptr;
  if (block && block->pool != tape.pool) tape.others[block->address] = block->number;
}

void begin_replay(const Tape& tape) {
  Locked held(runtime().lock);
  for (const auto& [address, number] : tape.others) {
    const auto* block = block_at(address);
    TORCH_CHECK(block && block->number == number,
                "a graph is replayed after memory that it uses was freed");
  }
  for (auto& each : tape.pool->freed) {
    if (each.capture < tape.capture) std::memset(each.address, 0xFF, each.bytes);
  }
}

void touch(const at::Tensor& tensor, Lane lane, int64_t clock, bool writes, const std::string& by) {
  auto* block = tensor.defined() && tensor.numel() ? block_of(tensor.storage()) : nullptr;
  if (!block) return;
  size_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) {
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  size_t first = static_cast<const char*>(tensor.const_data_ptr()) - static_cast<char*>(block->address);
  Use use{lane, clock, first, first + elements * tensor.itemsize(), writes, by};
  std::vector<std::string> wrong;
  {
    Locked held(runtime().lock);
    const auto& seen = runtime().seen[lane];
    std::vector<Use> rest;
    for (auto& other : block->uses) {
      if (other.lane != lane && (writes || other.writes) && overlap(use, other) &&
          !knows(seen, other.lane, other.clock)) {
        wrong.push_back(name_of(lane) + (writes ? " writes to" : " reads") + " memory (" + by +
                        ") without waiting for " + name_of(other.lane) + ", which " +
                        (other.writes ? "writes to it (" : "reads it (") + other.by + ")");
      }
      // Whoever has waited for the later use of the same bytes has waited for this one.
      bool over = other.lane == lane && other.writes == writes && use.first <= other.first &&
                  other.end <= use.end;
      if (!over) rest.push_back(std::move(other));
    }
    rest.push_back(std::move(use));
    block->uses = std::move(rest);
  }
  report(wrong);
}

std::vector<char> bytes_for(const at::Tensor& pinned, Lane lane, const std::string& by) {
  auto* first = static_cast<char*>(pinned.data_ptr());
  std::vector<char> bytes(first, first + pinned.nbytes());
  std::vector<std::string> wrong;
  {
    Locked held(runtime().lock);
    for (const auto& copy : runtime().late) {
      if (!copy.to_host) continue;
      auto* begin = std::max(first, copy.at);
      auto* end = std::min(first + bytes.size(), copy.at + copy.bytes.size());
      if (begin >= end) continue;
      if (knows(runtime().seen[lane], copy.lane, copy.clock)) {
        std::memcpy(&bytes[begin - first], &copy.bytes[begin - copy.at], end - begin);
      } else {
        wrong.push_back(name_of(lane) + " reads pinned memory (" + by + ") without waiting for " +
                        name_of(copy.lane) + ", which writes to it (" + copy.by + ")");
      }
    }
  }
  report(wrong);
  return bytes;
}

void add_late(bool to_host, const at::Tensor& pinned, std::vector<char> bytes, Lane lane,
              int64_t clock, const std::string& by) {
  auto* at = static_cast<char*>(pinned.data_ptr());
  std::vector<Late> over;  // let go of without the lock
  Locked held(runtime().lock);
  auto& late = runtime().late;
  if (to_host) {
    // What this stream knows to be read may be written over.
    for (auto copy = late.begin(); copy != late.end();) {
      bool meets = copy->at < at + bytes.size() && at < copy->at + copy->bytes.size();
      if (meets && knows(runtime().seen[lane], copy->lane, copy->clock)) {
        over.push_back(std::move(*copy));
        copy = late.erase(copy);
      } else {
        ++copy;
      }
    }
    std::memset(at, 0xFF, bytes.size());
  }
  late.push_back({to_host, pinned.storage(), at, std::move(bytes), lane, clock, by});
}

// ---------------------------------------------------------------- random numbers

namespace {

// The processor's, under the name of a device.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  static void check() {
    TORCH_CHECK(!runtime().tape || Permitted::depth(),
                "the state of a generator cannot be read or set when stream is capturing");
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    check();
    return at::CPUGeneratorImpl::get_state();
  }
  void set_state(const c10::TensorImpl& state) override {
    check();
    at::CPUGeneratorImpl::set_state(state);
  }
  void set_current_seed(uint64_t seed) override {
    check();
    at::CPUGeneratorImpl::set_current_seed(seed);
  }
  explicit DeviceGenerator(c10::DeviceIndex device) {
    device_ = {KIND, device};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int number = 0; number < MOST_DEVICES; number++) {
      made.push_back(at::make_generator<DeviceGenerator>(c10::DeviceIndex(number)));
    }
    return made;
  }();
  return all.at(device < 0 ? device_here : device);
}

// ---------------------------------------------------------------- what PyTorch asks of a device

namespace {

struct Moment {
  Clocks clocks;
  std::chrono::steady_clock::time_point time;
  bool asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device.index() >= 0) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, device_here}; }
  void setDevice(c10::Device device) const override {
    check_device(device.index());
    device_here = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_here = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return runtime().devices; }

  c10::Device whole(c10::Device device) const {
    return {KIND, device.index() < 0 ? device_here : device.index()};
  }
  c10::Stream getStream(c10::Device device) const override {
    auto on = whole(device);
    return c10::Stream(c10::Stream::UNSAFE, on, stream_here.at(on.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, whole(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, whole(device), next_stream++);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    stream_here.at(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked held(runtime().lock);
    auto lane = lane_of(stream);
    return knows(runtime().host, lane, runtime().seen[lane][lane]);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("Stream.synchronize", true);
    host_waits(moment_of(lane_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count_wait("synchronize", true);
    Clocks all;
    {
      Locked held(runtime().lock);
      for (const auto& [lane, seen] : runtime().seen) {
        if (lane >> STREAM_BITS == device) merge(all, seen);
      }
    }
    host_waits(all);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    TORCH_CHECK(!runtime().tape || runtime().tape->lane != lane_of(stream),
                "operation not permitted when stream is capturing: Event.record");
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = {moment_of(lane_of(stream)), std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for(lane_of(stream), static_cast<Moment*>(event)->clocks);
  }
  // The first answer is no, unless the host knows better.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& moment = *static_cast<Moment*>(event);
    bool known = true;
    {
      Locked held(runtime().lock);
      for (const auto& [lane, clock] : moment.clocks) known &= knows(runtime().host, lane, clock);
    }
    if (!known && std::exchange(moment.asked, true)) {
      host_waits(moment.clocks);
      known = true;
    }
    return known;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_wait("Event.synchronize", true);
    host_waits(static_cast<Moment*>(event)->clocks);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    auto between = static_cast<Moment*>(last)->time - static_cast<Moment*>(first)->time;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return runtime().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return runtime().devices; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? device_here : device);
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    const auto* block = block_at(address);
    TORCH_CHECK(block && !block->pinned, "this is no memory of a device");
    return {KIND, c10::DeviceIndex(block->device)};
  }
  bool isPinnedPtr(const void* address) const override {
    const auto* block = block_at(address);
    return block && block->pinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto device = storage.device();
    c10::DeviceGuard on(device);
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
    if (bytes == 0) storage.unsafeGetStorageImpl()->set_data_ptr(allocate_on(0, device.index(), false));
  }
};

[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

}  // namespace pretend
