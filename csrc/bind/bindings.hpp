// The parts of the native modules; each is defined in the file of its name.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_comm {

// _core
void bind_torch(pybind11::module_& m);
void bind_segment(pybind11::module_& m);
void bind_buffer(pybind11::module_& m);
void bind_handle(pybind11::module_& m);
void bind_low_latency_calls(pybind11::module_& m);
void bind_layer_calls(pybind11::module_& m);
void bind_streams(pybind11::module_& m);
void bind_region(pybind11::module_& m);
void bind_host_counters(pybind11::module_& m);
void bind_simulation(pybind11::module_& m);
void bind_engine_host(pybind11::module_& m);
void bind_examples(pybind11::module_& m);
void bind_scale(pybind11::module_& m);
void bind_trace(pybind11::module_& m);

// _cuda
void bind_memory_cuda(pybind11::module_& m);
void bind_stream_cuda(pybind11::module_& m);
void bind_engine_cuda(pybind11::module_& m);
void bind_bench_cuda(pybind11::module_& m);

}  // namespace deep_comm
