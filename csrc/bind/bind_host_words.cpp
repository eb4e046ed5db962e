// Functions of plain numbers: both run in every step of "auto".
#include "bind/bindings.hpp"
#include "bind/numbers.hpp"
#include "bind/patient_words.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

py::int_ tell(const HostWords& words, const std::array<uint64_t, 1>& numbers) {
  return words.tell(numbers[0]);
}

py::object most(const HostWords& words, const std::array<uint64_t, 1>& numbers) {
  const std::optional<uint64_t> found = patient_most(words, numbers[0]);
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
