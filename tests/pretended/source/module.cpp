// What Python asks of the pretended accelerator.
#include "runtime.h"

#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

namespace py = pybind11;
using pretend::runtime;

namespace pretend {
void bind_group(py::module_& module);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pretend::register_kernels();
  module.def("set_up", [](int devices, int64_t limit_bytes, const std::string& log) {
    TORCH_CHECK(devices >= 0 && devices <= pretend::MOST_DEVICES, "there may be ",
                pretend::MOST_DEVICES, " devices, not ", devices);
    runtime().devices = devices;
    runtime().process = getpid();
    runtime().limit_bytes = limit_bytes;
    runtime().log = log;
  });
  module.def("device_count", [] { return runtime().devices; });
  module.def("generator", [](int device) { return pretend::default_generator(device); });
  module.def("with_keys", pretend::with_keys);
  module.def("allocations", [] {
    int64_t all = 0;
    for (const auto& usage : runtime().usage) all += usage.allocations;
    return all;
  });
  module.def("set_waits_raise", [](bool raise) { runtime().waits_raise = raise; });
  module.def("set_counts", [](bool counts) { runtime().counts = counts; });
  module.def("note", pretend::note);
  module.def("reports", [] {
    pretend::Locked held(runtime().lock);
    return std::exchange(runtime().reports, {});
  });
  module.def("set_watch", [](py::object call) {
    auto* kept = new py::object(std::move(call));  // for good: other threads may be calling it
    runtime().watch = [kept](const char* kind, const std::string& what) {
      py::gil_scoped_acquire python;
      (*kept)(kind, what);
    };
  });
  pretend::bind_group(module);
}
