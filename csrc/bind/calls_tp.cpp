// Collectives and words as Python's functions.
#include <string>

#include "bind/bindings.hpp"
#include "bind/buffer.hpp"
#include "host/calls/collective.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

// (x, num_sms) -> out
py::object call_all_gather(BoundBuffer& buffer, const Arguments<2>& given) {
  const auto [x, num_sms] = given;
  return object_of(all_gather(buffer.context, buffer.reader.read(x), read_integer(num_sms)));
}

// (x, num_sms) -> out
py::object call_reduce_scatter(BoundBuffer& buffer, const Arguments<2>& given) {
  const auto [x, num_sms] = given;
  return object_of(reduce_scatter(buffer.context, buffer.reader.read(x), read_integer(num_sms)));
}

// (x, method: 0 auto, 1 one shot, 2 two shots, num_sms) -> out
py::object call_all_reduce(BoundBuffer& buffer, const Arguments<3>& given) {
  const auto [x, method, num_sms] = given;
  return object_of(all_reduce(buffer.context, buffer.reader.read(x),
                              static_cast<AllReduceMethod>(read_integer(method).value),
                              read_integer(num_sms)));
}

// (address of the peer's word, peer)
py::object call_signal_word(BoundBuffer& buffer, const Arguments<2>& given) {
  const auto [word, peer] = given;
  signal_word(buffer.context, static_cast<uintptr_t>(read_integer(word).value),
              static_cast<int>(read_integer(peer).value));
  return py::none();
}

// (address of the word, address of its count, peer)
py::object call_await_word(BoundBuffer& buffer, const Arguments<3>& given) {
  const auto [word, count, peer] = given;
  await_word(buffer.context, static_cast<uintptr_t>(read_integer(word).value),
             static_cast<uintptr_t>(read_integer(count).value),
             static_cast<int>(read_integer(peer).value));
  return py::none();
}

}  // namespace

void bind_tp_calls(BufferClass& buffer) {
  def_call<&call_all_gather>(buffer, "all_gather");
  def_call<&call_reduce_scatter>(buffer, "reduce_scatter");
  def_call<&call_all_reduce>(buffer, "all_reduce");
  def_call<&call_signal_word>(buffer, "signal_word");
  def_call<&call_await_word>(buffer, "await_word");
  buffer.def(
      "set_staging",
      [](BoundBuffer& self, size_t offset, size_t num_bytes) {
        self.context.staging = {offset, num_bytes};
      },
      py::kw_only(), py::arg("offset"), py::arg("num_bytes"),
      "Where collectives stage: two parts of num_bytes, from the heap's base.");
}

}  // namespace deep_comm
