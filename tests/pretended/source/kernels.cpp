// Operators: the processor's kernels compute on the memory of a device.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_map>

namespace pretend {

using at::Tensor;
using c10::IValue;

namespace {

// Those that `torch.use_deterministic_algorithms` refuses on a GPU, by its documentation; where it
// depends on their arguments, see `is_refused`.
const std::set<std::string> REFUSED = {
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward",
    "upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward", "put_", "histc",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward"};

// Those that have the size of their result from the device.
const std::set<std::string> WAITING = {"nonzero", "masked_select", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "bincount"};

const std::set<std::string> INDEXING = {"index", "index_put_", "_index_put_impl_", "index_put"};

constexpr size_t SMALL_BYTES = 1 << 16;

// Those that read nothing of a tensor's values.
const std::set<std::string> OF_NO_VALUES = {"is_set_to", "_fused_sdp_choice"};

using Arguments = c10::ArrayRef<IValue>;

bool is_refused(const std::string& name, const c10::FunctionSchema& schema, Arguments given) {
  auto of = [&](const char* argument) -> const IValue& {
    return given[*schema.argumentIndexWithName(argument)];
  };
  if (REFUSED.count(name)) return true;
  if (name == "bincount") return of("weights").isTensor() && of("weights").toTensor().defined();
  if (name == "median") return schema.argumentIndexWithName("dim").has_value();
  if (name == "cumsum" || name == "cumsum_") {
    return !at::isIntegralType(of("self").toTensor().scalar_type(), true);
  }
  if (name == "scatter_reduce" || name == "scatter_reduce_") return of("reduce") == IValue("prod");
  return name == "_embedding_bag_dense_backward" && of("mode").toInt() == 2;
}

// Call a function with each tensor of an argument.
template <typename F>
void each_tensor(const IValue& value, F&& call) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) call(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorList()) call(tensor);
  } else if (value.isOptionalTensorList()) {
    for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor && tensor->defined()) call(*tensor);
    }
  }
}

// The same argument with each tensor replaced.
template <typename F>
IValue replaced(const IValue& value, F&& by) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(by(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorList()) list.push_back(by(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(by(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

bool is_ours(const Tensor& tensor) { return tensor.device().type() == KIND; }

// The device of an operator's tensors, which is one.
c10::Device device_of(const std::string& name, Arguments given) {
  std::optional<c10::Device> device;
  for (const auto& value : given) {
    each_tensor(value, [&](const Tensor& tensor) {
      if (!device && is_ours(tensor)) device = tensor.device();
    });
  }
  for (const auto& value : given) {
    if (!device && value.isDevice() && value.toDevice().type() == KIND) device = value.toDevice();
  }
  if (!device || !device->has_index()) device = c10::Device(KIND, current_device());
  for (size_t number = 0; number < given.size(); number++) {
    bool of_host = number > 0 && INDEXING.count(name);  // indices may come from there
    each_tensor(given[number], [&](const Tensor& tensor) {
      if (tensor.device() == *device) return;
      if (tensor.device().is_cpu() && (tensor.dim() == 0 || of_host)) return;
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                  "devices, ", *device, " and ", tensor.device(), "! (", name, ")");
    });
  }
  return *device;
}

// A look at whether the host waits before it goes on.
void look_for_waits(const std::string& name, const c10::FunctionSchema& schema, Arguments given) {
  bool waits = WAITING.count(name);
  for (const auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    waits |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
  }
  if (name == "repeat_interleave") waits = given[1].isNone();  // without the size of its result
  if (INDEXING.count(name)) {
    each_tensor(given[1], [&](const Tensor& index) {
      waits |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte ||
               (index.device().is_cpu() && index.dim() > 0);
    });
  }
  if (!waits || OF_NO_VALUES.count(name)) return;
  count_wait(name);
}

// Gives the processor's own generator the state of a device's for a while.
class Draws {
 public:
  explicit Draws(const at::Generator& from)
      : locked_(both()), from_(from), own_(at::detail::getDefaultCPUGenerator()),
        before_(own_.get_state()) {
    own_.set_state(from_.get_state());
  }
  ~Draws() {
    from_.set_state(own_.get_state());
    own_.set_state(before_);
  }

 private:
  static std::mutex& both() {
    static std::mutex lock;
    return lock;
  }
  Permitted permitted_;
  std::lock_guard<std::mutex> locked_;
  at::Generator from_, own_;
  Tensor before_;
};

Tensor seen_as(const Tensor& tensor, c10::Storage storage, c10::DispatchKeySet keys) {
  auto seen = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys, tensor.dtype());
  auto* impl = seen.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

// Runs one operator: its tensors are lent to the processor, and taken back with what it makes.
class Call {
 public:
  explicit Call(c10::Device device) : device_(device) {}

  Tensor lend(const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    const auto& storage = tensor.storage();
    auto& lent = storages_[storage.unsafeGetStorageImpl()];
    if (!lent) {
      auto* kept = new c10::Storage(storage);
      c10::DataPtr pointer(const_cast<void*>(storage.data()), kept,
                           [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::kCPU);
      lent = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer),
                          c10::GetCPUAllocator(), true);
      owners_.emplace(lent.unsafeGetStorageImpl(), storage);
    }
    auto host = seen_as(tensor, lent, c10::DispatchKeySet(c10::DispatchKey::CPU));
    tensors_.emplace_back(tensor, host);
    return host;
  }

  // A kernel may have resized what it was given to write to.
  void take_back() {
    for (auto& [ours, host] : tensors_) {
      auto* impl = ours.unsafeGetTensorImpl();
      if (host.storage().data() != ours.storage().data()) {
        impl->set_storage_keep_dtype(adopt(host.storage(), ours.get_device()));
        owners_[host.storage().unsafeGetStorageImpl()] = ours.storage();
      }
      if (ours.sizes() != host.sizes() || ours.strides() != host.strides()) {
        impl->set_sizes_and_strides(host.sizes(), host.strides());
      }
    }
  }

  Tensor result(const Tensor& made) {
    for (const auto& [ours, host] : tensors_) {
      if (host.is_same(made)) return ours;
    }
    if (is_ours(made)) return made;
    auto owner = owners_.find(made.storage().unsafeGetStorageImpl());
    auto storage = owner == owners_.end() ? adopt(made.storage(), device_.index()) : owner->second;
    owners_.emplace(made.storage().unsafeGetStorageImpl(), storage);
    return seen_as(made, storage, KEYS);
  }

 private:
  c10::Device device_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> owners_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
};

bool is_view(const c10::FunctionSchema& schema) {
  const auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  return alias && !alias->isWrite();
}

// Tensors of some arguments, in order.
std::vector<Tensor> tensors_in(Arguments given) {
  std::vector<Tensor> found;
  for (const auto& value : given) each_tensor(value, [&](const Tensor& t) { found.push_back(t); });
  return found;
}

void redispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                const std::optional<at::Generator>& draws) {
  std::optional<Draws> drawing;
  if (draws) drawing.emplace(*draws);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// The address of a tensor's memory, for the processor; the memory may be freed.
Tensor bare(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr pointer(const_cast<void*>(storage.data()), c10::kCPU);
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), nullptr,
                     false);
  return seen_as(tensor, std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU));
}

// What a graph keeps of an argument: addresses of device memory, and values of the host's.
IValue kept_of(const IValue& value) {
  return replaced(value, [](const Tensor& tensor) {
    if (is_ours(tensor)) return bare(tensor);
    auto copy = tensor.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(
        tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  });
}

using Uses = std::vector<std::pair<Tensor, bool>>;

// Notes what a replay will do in the place of a launch. What the launch has written elsewhere is
// undone, and what it has made is lost at the end of the capture: results are NaN until a replay.
void capture(Tape& tape, const c10::OperatorHandle& op, const std::string& name,
             std::vector<IValue> kept, Uses uses, torch::jit::Stack* stack,
             const std::optional<at::Generator>& draws) {
  const auto& schema = op.schema();
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
  Permitted permitted;
  std::vector<std::pair<Tensor, Tensor>> before;
  std::set<const void*> known;
  for (size_t number = 0; number < kept.size(); number++) {
    const auto* alias = schema.arguments()[number].alias_info();
    each_tensor(kept[number], [&](const Tensor& tensor) {
      known.insert(tensor.storage().data());
      if (alias && alias->isWrite()) before.emplace_back(tensor, tensor.clone());
    });
  }
  const std::vector<IValue> lent(stack->end() - kept.size(), stack->end());
  auto state = draws ? draws->get_state() : Tensor();
  redispatch(op, stack, draws);
  if (draws) const_cast<at::Generator&>(*draws).set_state(state);
  for (auto& [tensor, old] : before) {
    // Memory of its own keeps what was written until the end of the capture.
    const auto* block = block_at(tensor.storage().data());
    if (!block || block->pool != tape.pool) tensor.copy_(old);
  }
  for (size_t number = 0; number < kept.size(); number++) {
    // What was resized to be written to has other memory from now on.
    const auto* alias = schema.arguments()[number].alias_info();
    if (alias && alias->isWrite() && lent[number].isTensor() &&
        lent[number].toTensor().sizes() != kept[number].toTensor().sizes()) {
      kept[number] = bare(lent[number].toTensor());
    }
  }
  std::vector<IValue> made;
  for (size_t number = stack->size() - schema.returns().size(); number < stack->size(); number++) {
    made.push_back(replaced((*stack)[number], bare));
  }
  for (const auto& tensor : tensors_in(made)) {
    if (!known.count(tensor.storage().data())) tape.made.push_back(tensor);
  }
  tape.calls.push_back([=](Lane lane, int64_t clock) {
    for (const auto& [tensor, writes] : uses) touch(tensor, lane, clock, writes, name);
    at::AutoDispatchBelowADInplaceOrView under;
    c10::impl::ExcludeDispatchKeyGuard bare_keys(c10::autocast_dispatch_keyset);
    torch::jit::Stack again(kept.begin(), kept.end());
    redispatch(op, &again, draws);
    const std::vector<IValue> came(again.end() - op.schema().returns().size(), again.end());
    auto from = tensors_in(came), to = tensors_in(made);
    TORCH_CHECK(from.size() == to.size(), name, " gave another number of tensors in a replay");
    for (size_t number = 0; number < from.size(); number++) {
      if (from[number].storage().data() != to[number].storage().data()) {
        TORCH_CHECK(from[number].sizes() == to[number].sizes(), name, " has other sizes in a replay");
        to[number].copy_(from[number]);
      }
    }
  });
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name().substr(schema.name().find("::") + 2);
  const auto first = stack->size() - schema.arguments().size();
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  const auto device = device_of(name, given);
  if (at::globalContext().deterministicAlgorithms() && is_refused(name, schema, given)) {
    at::globalContext().alertNotDeterministic(name);
  }
  look_for_waits(name, schema, given);
  auto* tape = runtime().tape;
  if (tape && (is_view(schema) || OF_NO_VALUES.count(name))) tape = nullptr;
  if (tape && tape->lane != current_lane(device.index())) tape = nullptr;
  Uses uses;
  if (!is_view(schema) && !OF_NO_VALUES.count(name)) {
    auto lane = current_lane(device.index());
    auto clock = launch(lane, name);
    for (size_t number = 0; number < given.size(); number++) {
      const auto* alias = schema.arguments()[number].alias_info();
      each_tensor(given[number], [&](const Tensor& tensor) {
        const bool writes = alias && alias->isWrite();
        if (tape && is_ours(tensor)) {
          note_use(*tape, tensor);
          uses.emplace_back(bare(tensor), writes);
        } else if (!tape) {
          touch(tensor, lane, clock, writes, name);
        }
      });
    }
  }

  std::vector<IValue> kept;  // before they are lent
  for (size_t number = 0; tape && number < given.size(); number++) {
    kept.push_back(given[number].isDevice() ? IValue(c10::Device(c10::kCPU))
                   : given[number].isGenerator() ? IValue() : kept_of(given[number]));
  }
  Call call(device);
  std::optional<at::Generator> draws;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) draws = default_generator(device.index());
  for (size_t number = 0; number < given.size(); number++) {
    auto& value = (*stack)[first + number];
    if (value.isDevice()) value = c10::Device(c10::kCPU);
    if (value.isGenerator()) {
      draws = value.toGenerator();
      TORCH_CHECK(draws->device().type() == KIND, "Expected a 'pretend' device type for generator "
                  "but found '", draws->device().type(), "'");
      value = IValue();
    }
    value = replaced(value, [&](const Tensor& tensor) { return call.lend(tensor); });
  }
  if (tape) {
    capture(*tape, op, name, std::move(kept), std::move(uses), stack, draws);
  } else {
    redispatch(op, stack, draws);
  }
  call.take_back();
  for (size_t number = stack->size() - schema.returns().size(); number < stack->size(); number++) {
    auto& value = (*stack)[number];
    value = replaced(value, [&](const Tensor& tensor) { return call.result(tensor); });
  }
  // What the host has read of it, it has waited for.
  if (WAITING.count(name) || name == "_local_scalar_dense" || name == "equal") {
    host_waits(moment_of(current_lane(device.index())));
  }
}

// ---------------------------------------------------------------- copies

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from) || to.numel() == 0) return to;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
  const bool in = is_ours(to), out = is_ours(from);
  auto host = [](const Tensor& tensor) { return is_ours(tensor) ? as_host(tensor) : tensor; };
  if (in && out) {
    auto* tape = runtime().tape;
    if (tape && tape->lane == current_lane(to.get_device())) {
      TORCH_CHECK(to.get_device() == from.get_device(), "a copy between devices in a capture");
      note_use(*tape, to);
      note_use(*tape, from);
      const auto into = bare(to), out_of = bare(from);
      tape->calls.push_back([=](Lane lane, int64_t clock) {
        touch(out_of, lane, clock, false, "copy_");
        touch(into, lane, clock, true, "copy_");
        at::AutoDispatchBelowADInplaceOrView under;
        c10::impl::ExcludeDispatchKeyGuard bare_keys(c10::autocast_dispatch_keyset);
        Tensor(into).copy_(out_of);
      });
      // Memory of its own keeps what was written until the end of the capture.
      const auto* block = block_at(into.storage().data());
      if (block && block->pool == tape->pool) Tensor(into).copy_(out_of);
      return to;
    }
    // Both devices' streams wait for one another, before and after.
    auto there = current_lane(to.get_device()), here = current_lane(from.get_device());
    auto clock = launch(here, "copy_");
    if (there != here) wait_for(here, moment_of(there));
    touch(from, here, clock, false, "copy_");
    touch(to, here, clock, true, "copy_");
    if (there != here) wait_for(there, moment_of(here));
    host(to).copy_(host(from));
    return to;
  }
  auto lane = current_lane((in ? to : from).get_device());
  TORCH_CHECK(!runtime().tape || runtime().tape->lane != lane,
              "operation not permitted when stream is capturing: a copy between host and device");
  const auto& of_host = in ? from : to;
  const std::string what = in ? "copy_ to a device" : "copy_ to the host";
  const bool pinned = of_host.is_contiguous() && of_host.is_pinned();
  const bool late = non_blocking && pinned;
  // A little goes to a GPU with the command that copies it.
  const bool small = in && non_blocking && !pinned && of_host.nbytes() <= SMALL_BYTES;
  // PyTorch does not count a copy as synchronizing that the script has asked not to be.
  if (!late && !small) count_wait(what + (pinned ? "" : ", which is not pinned"), non_blocking);
  auto clock = launch(lane, what);
  touch(in ? to : from, lane, clock, in, what);
  if (late) {
    auto pause = at::empty(of_host.sizes(), of_host.options().pinned_memory(false));
    if (in) {
      auto bytes = bytes_for(of_host, lane, what);
      std::memcpy(pause.data_ptr(), bytes.data(), bytes.size());
      host(to).copy_(pause);
      add_late(false, of_host, std::move(bytes), lane, clock, what);
    } else {
      pause.copy_(host(from));
      auto* first = static_cast<char*>(pause.data_ptr());
      add_late(true, of_host, {first, first + pause.nbytes()}, lane, clock, what);
    }
    return to;
  }
  if (!small) host_waits(moment_of(lane));
  host(to).copy_(host(from));
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor into = to;
  return copy_(into, from, non_blocking);
}

void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  bool here = true;
  for (size_t i = 0; i < to.size(); i++) {
    here &= to[i].device() == to[0].device() && from[i].device() == to[0].device();
  }
  if (here) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_foreach_copy_", "");
    torch::jit::Stack given{to, from, non_blocking};
    compute(op, &given);
  } else {
    for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i], non_blocking);
  }
}

// ---------------------------------------------------------------- memory, and views of it

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pinned,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(size, &allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), KEYS,
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(self.device());
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  auto numel = int64_t(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {numel}, {});
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard on(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------- kernels that no processor has

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto parts = gates.chunk(4, 1);
  auto after = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * after.tanh(), after, gates};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  bool bias = input_bias && input_bias->defined();
  auto in = (bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto old = (bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  auto next = (in[2] + (in[0] + old[0]).sigmoid() * old[2]).tanh();
  return {next + (in[1] + old[1]).sigmoid() * (hidden - next), hidden};
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // written out: products, and a softmax
}

}  // namespace

Tensor as_host(const Tensor& tensor) { return Call(tensor.device()).lend(tensor); }

Tensor with_keys(const Tensor& tensor) {
  return is_ours(tensor) ? seen_as(tensor, tensor.storage(), KEYS) : tensor;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_foreach_copy_", foreach_copy_);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("resize_", resize_);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
}

// A GPU has kernels of its own for what the processor has them for, for convolutions, and for lists
// of tensors. Only without would PyTorch compose them of others.
void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.getNamespace().value_or("") != "aten") continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    bool own = name.name.find("::_foreach_") != std::string::npos ||
               name.name == "aten::convolution" || name.name == "aten::convolution_backward";
    own &= op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (own || op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
    }
  }
}

}  // namespace pretend
