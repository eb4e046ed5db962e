// Functions of plain numbers: both run in every step of "auto".
#include "bind/bindings.hpp"
#include "bind/numbers.hpp"
#include "host/host_words.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

// A step of few tokens takes some tens of microseconds; a rank that is later than this is looked
// for elsewhere.
constexpr std::chrono::microseconds kPatience{200};

py::int_ tell(const HostWords& words, const std::array<uint64_t, 1>& numbers) {
  return words.tell(numbers[0]);
}

py::object most(const HostWords& words, const std::array<uint64_t, 1>& numbers) {
  const uint64_t exchange = numbers[0];
  std::optional<uint64_t> found = words.most(exchange);
  if (!found) {
    py::gil_scoped_release release;  // the others may be threads
    found = words.wait_most(exchange, kPatience);
  }
  if (!found) return py::none();
  return py::int_(*found);
}

py::int_ last_exchange(const HostWords& words, const std::array<uint64_t, 0>& /*none*/) {
  return words.exchange();
}

void set_exchange(const HostWords& words, const std::array<uint64_t, 1>& numbers) {
  words.set_exchange(numbers[0]);
}

}  // namespace

void bind_host_words(py::module_& m) {
  m.def("host_words_bytes", &HostWords::num_bytes, py::arg("num_ranks"));
  m.def(
      "host_words",
      [](uintptr_t address, int rank, int num_ranks, const py::object& owner) {
        const HostWords words(address, rank, num_ranks);
        return py::make_tuple(number_function<1, &tell>("tell", words, owner),
                              number_function<1, &most>("most", words, owner),
                              number_function<0, &last_exchange>("exchange", words, owner),
                              number_function<1, &set_exchange>("set_exchange", words, owner));
      },
      py::arg("address"), py::arg("rank"), py::arg("num_ranks"), py::arg("owner"));
}

}  // namespace deep_comm
