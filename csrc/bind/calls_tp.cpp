// Collectives and words as Python's functions.
#include <string>

#include "bind/bindings.hpp"
#include "bind/buffer.hpp"
#include "host/calls/collective.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

int digest_of(PyObject* given) { return static_cast<int>(read_integer(given).value); }

// (x, num_sms, digest) -> out
py::object call_all_gather(BoundBuffer& buffer, const Arguments<3>& given) {
  const auto [x, num_sms, digest] = given;
  return object_of(
      all_gather(buffer.context, buffer.reader.read(x), read_integer(num_sms), digest_of(digest)));
}

// (x, num_sms, digest) -> out
py::object call_reduce_scatter(BoundBuffer& buffer, const Arguments<3>& given) {
  const auto [x, num_sms, digest] = given;
  return object_of(reduce_scatter(buffer.context, buffer.reader.read(x), read_integer(num_sms),
                                  digest_of(digest)));
}

// (x, method: 0 auto, 1 one shot, 2 two shots, num_sms, digest) -> out
py::object call_all_reduce(BoundBuffer& buffer, const Arguments<4>& given) {
  const auto [x, method, num_sms, digest] = given;
  return object_of(all_reduce(buffer.context, buffer.reader.read(x),
                              static_cast<AllReduceMethod>(read_integer(method).value),
                              read_integer(num_sms), digest_of(digest)));
}

// (x, residual, weight, eps, num_sms) -> (normed, residual)
py::object call_all_reduce_norm(BoundBuffer& buffer, const Arguments<5>& given) {
  const auto [x, residual, weight, eps, num_sms] = given;
  const auto read = [&](PyObject* tensor) { return buffer.reader.read(tensor); };
  auto [normed, sum] = all_reduce_norm(buffer.context, read(x), read(residual), read(weight),
                                       py::handle(eps).cast<float>(), read_integer(num_sms));
  return py::make_tuple(object_of(std::move(normed)), object_of(std::move(sum)));
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

uint64_t* word_at(PyObject* address) {
  return reinterpret_cast<uint64_t*>(static_cast<uintptr_t>(read_integer(address).value));
}
uint8_t* bytes_at(PyObject* address) {
  return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(read_integer(address).value));
}

// (digest, address of the sequence, of the fault)
py::object call_begin_matmul(BoundBuffer& buffer, const Arguments<3>& given) {
  const auto [digest, sequence, fault] = given;
  MatmulArgs args{};
  args.sequence = word_at(sequence);
  args.fault = reinterpret_cast<int64_t*>(word_at(fault));
  begin_matmul(buffer.context, args, digest_of(digest));
  return py::none();
}

// (address to copy from, to copy to, bytes, address of the sequence, of the peer's word)
py::object call_push(BoundBuffer& buffer, const Arguments<5>& given) {
  const auto [src, dst, num_bytes, sequence, word] = given;
  push(buffer.context, {{},
                        bytes_at(src),
                        bytes_at(dst),
                        read_integer(num_bytes).value,
                        word_at(sequence),
                        word_at(word)});
  return py::none();
}

// (address of the word, of the sequence, the peer that pushes)
py::object call_await_push(BoundBuffer& buffer, const Arguments<3>& given) {
  const auto [word, sequence, peer] = given;
  MatmulArgs args{};
  args.word = word_at(word);
  args.sequence = word_at(sequence);
  args.peer = static_cast<int>(read_integer(peer).value);
  await_push(buffer.context, args);
  return py::none();
}

// (address of the slots, bytes of one, bytes from one to the next, address of out, dtype: 0 bf16, 1 fp16,
// 2 float32, address of the words, words of a rank, address of the sequence)
py::object call_add_slots(BoundBuffer& buffer, const Arguments<8>& given) {
  const auto [slots, num_bytes, stride, out, dtype, words, words_per_rank, sequence] = given;
  AddSlotsArgs args{};
  args.slots = bytes_at(slots);
  args.slot_vecs = read_integer(stride).value / static_cast<int64_t>(sizeof(Vec16));
  args.out = bytes_at(out);
  args.num_bytes = read_integer(num_bytes).value;
  args.words = word_at(words);
  args.words_per_rank = static_cast<int>(read_integer(words_per_rank).value);
  args.sequence = word_at(sequence);
  add_slots(buffer.context, args, static_cast<Dtype>(read_integer(dtype).value));
  return py::none();
}

// (address of the fault)
py::object call_end_matmul(BoundBuffer& buffer, const Arguments<1>& given) {
  MatmulArgs args{};
  args.fault = reinterpret_cast<int64_t*>(word_at(given[0]));
  end_matmul(buffer.context, args);
  return py::none();
}

}  // namespace

void bind_tp_calls(BufferClass& buffer) {
  def_call<&call_all_gather>(buffer, "all_gather");
  def_call<&call_reduce_scatter>(buffer, "reduce_scatter");
  def_call<&call_all_reduce>(buffer, "all_reduce");
  def_call<&call_all_reduce_norm>(buffer, "all_reduce_norm");
  def_call<&call_signal_word>(buffer, "signal_word");
  def_call<&call_await_word>(buffer, "await_word");
  def_call<&call_begin_matmul>(buffer, "begin_matmul");
  def_call<&call_push>(buffer, "push");
  def_call<&call_await_push>(buffer, "await_push");
  def_call<&call_add_slots>(buffer, "add_slots");
  def_call<&call_end_matmul>(buffer, "end_matmul");
  buffer.def(
      "set_staging",
      [](BoundBuffer& self, size_t offset, size_t num_bytes, uintptr_t multicast) {
        self.context.staging = {offset, num_bytes, reinterpret_cast<uint8_t*>(multicast)};
      },
      py::kw_only(), py::arg("offset"), py::arg("num_bytes"), py::arg("multicast"),
      "Where peers push parts of collectives, from the heap's base; and the address that "
      "stands for all heaps' bases, or 0.");
}

}  // namespace deep_comm
