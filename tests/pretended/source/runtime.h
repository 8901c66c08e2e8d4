// What the parts of the pretended accelerator share: streams, memory, and what they report.
//
// Kernels run at once, on the thread that launches them. What is delayed is what may be known of
// them: every stream has a clock, the number of its launches, and it knows up to which launch of
// every other stream it has waited. So does the host. A device that computes for real may run a
// launch at any time after what it has waited for, so whatever is done without that knowledge is
// an error here, even if the bits happen to be right.
//
// No thread asks for Python's lock while it holds the lock of the runtime.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace pretend {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 16;
// What tensors of a device are dispatched by: the first comes first. By the second PyTorch knows
// them for one of the kinds between which `parameter.data = ...` may change.
constexpr c10::DispatchKeySet KEYS({c10::DispatchKey::PrivateUse1, c10::DispatchKey::CPU});

// A stream of a device as one number.
using Lane = int64_t;
// Up to which launch of each stream somebody has waited.
using Clocks = std::map<Lane, int64_t>;

// That a launch reads or writes some bytes of a block.
struct Use {
  Lane lane;
  int64_t clock;
  size_t first, end;
  bool writes;
  std::string by;
};

// Memory of captured graphs: what one has freed, a later capture may use again.
struct Pool {
  struct Freed {
    void* address;
    size_t bytes;
    int device;
    c10::Storage of_host;
    int64_t capture;  // the last capture that had begun by then
  };
  int64_t captures = 0;
  std::vector<Freed> freed;
  ~Pool();
};

// Memory of a device, or pinned memory of the host.
struct Block {
  void* address = nullptr;
  size_t bytes = 0;
  int device = 0;
  bool pinned = false;
  Lane home = 0;  // the stream that it was allocated on, where it may be used again once it is free
  std::set<Lane> recorded;  // by record_stream
  std::vector<Use> uses;
  c10::Storage of_host;  // of a kernel of the processor that has made it; otherwise it is our own
  std::shared_ptr<Pool> pool;  // of the graph in whose capture it was allocated
  int64_t number = 0;          // never used again, unlike its address
};

// A copy whose outcome the host may not rely on before it has waited.
struct Late {
  bool to_host;
  c10::Storage host;  // the pinned memory, whole
  char* at;           // where in it
  std::vector<char> bytes;  // what has come for the host, or what it had sent
  Lane lane;
  int64_t clock;
  std::string by;
};

// What is captured on a stream: launches, to be run whenever the graph is replayed. It has addresses
// of memory and keeps none of it, but for that of its own pool.
struct Tape {
  Lane lane = 0;
  std::shared_ptr<Pool> pool;
  int64_t capture = 0;
  std::vector<std::function<void(Lane, int64_t)>> calls;
  std::vector<at::Tensor> made;  // addresses of results
  std::map<const void*, int64_t> others;  // blocks of other memory, by address, and their numbers
};

struct Usage {
  int64_t bytes = 0, peak_bytes = 0, allocations = 0;
};

struct Runtime {
  std::recursive_mutex lock;
  int devices = 1;
  int64_t limit_bytes = int64_t(1) << 40;
  std::map<Lane, Clocks> seen;
  Clocks host;
  std::vector<Late> late;
  std::vector<std::string> reports;
  std::map<uintptr_t, Block*> blocks;
  Usage usage[MOST_DEVICES];
  int process = 0;  // the only one that may use the devices: no fork of it
  std::string log;  // a file to which reports are written as well, for others to read
  bool waits_raise = false;
  bool counts = false;
  Tape* tape = nullptr;  // one capture at a time, and nothing may wait while there is one
  // Called with "launch", "wait" or "report", and what it is.
  std::function<void(const char*, const std::string&)> watch;
};
Runtime& runtime();

// Where kernels of this thread may read and set the state of a device's generator in a capture.
struct Permitted {
  Permitted() { depth()++; }
  ~Permitted() { depth()--; }
  static int& depth();
};
using Locked = std::lock_guard<std::recursive_mutex>;

// Devices and streams. A communicator has a stream of its own on each device.
c10::DeviceIndex current_device();
Lane lane_of(const c10::Stream& stream);
Lane current_lane(int device);
Lane new_lane(int device);
// Count a launch on a stream; returns the number of it.
int64_t launch(Lane lane, const std::string& what);
// Have a stream wait for what another has launched so far.
void wait_for(Lane lane, const Clocks& clocks);
Clocks moment_of(Lane lane);
// Count a wait of the host. One that a script asks for by name never raises.
void count_wait(const std::string& what, bool asked_for = false);
// The host has waited: late copies are done.
void host_waits(const Clocks& clocks);
void report(const std::vector<std::string>& what);
// The same without the line that has caused it, where Python cannot be asked.
void note(const std::string& what);
// Note what a capture uses of memory that is not of its pool.
void note_use(Tape& tape, const at::Tensor& tensor);
// Before a replay: that memory must still be there, and what was freed earlier is overwritten.
void begin_replay(const Tape& tape);

// Memory.
c10::DeviceAllocator& allocator();
c10::Allocator& pinned_allocator();
const Block* block_at(const void* address);
// The block of memory of a device, or none.
Block* block_of(const c10::Storage& storage);
// Take over what a kernel of the processor has made.
c10::Storage adopt(const c10::Storage& made, int device);
// Note a use of a tensor by a launch, and report what it should have waited for.
void touch(const at::Tensor& tensor, Lane lane, int64_t clock, bool writes, const std::string& by);
// Bytes of pinned memory as a copy on a stream will find them.
std::vector<char> bytes_for(const at::Tensor& pinned, Lane lane, const std::string& by);
void add_late(bool to_host, const at::Tensor& pinned, std::vector<char> bytes, Lane lane,
              int64_t clock, const std::string& by);

const at::Generator& default_generator(int device);

// A tensor in the same memory, which the processor's kernels take for their own.
at::Tensor as_host(const at::Tensor& tensor);
// Let the processor's kernels compute for devices; to be called once, after all else is registered.
void register_kernels();
// The same tensor with the keys that those of devices have.
at::Tensor with_keys(const at::Tensor& tensor);

}  // namespace pretend
