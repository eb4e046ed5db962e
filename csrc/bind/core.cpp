// deep_comm._core: the host target. Its Python face is described in deep_comm/_core.pyi.
#include "bind/bindings.hpp"
#include "device/layout/workspace.cuh"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The host target: the protocol kernels over the SIMT executor, and shared memory.";
  m.attr("version") = DEEP_COMM_VERSION;
  m.attr("max_channels") = deep_comm::kMaxChannels;
  m.attr("max_topk") = deep_comm::kMaxTopk;
  m.attr("max_low_latency_tokens") = deep_comm::kMaxLowLatencyTokens;
  deep_comm::bind_torch(m);
  deep_comm::bind_segment(m);
  deep_comm::bind_streams(m);
  deep_comm::bind_region(m);
  deep_comm::bind_handle(m);
  deep_comm::bind_buffer(m);
  deep_comm::bind_low_latency_calls(m);
  deep_comm::bind_layer_calls(m);
  deep_comm::bind_host_counters(m);
  // Before the engine, whose signatures name the Simulation.
  deep_comm::bind_simulation(m);
  deep_comm::bind_engine_host(m);
  deep_comm::bind_examples(m);
  deep_comm::bind_scale(m);
  deep_comm::bind_trace(m);
}
