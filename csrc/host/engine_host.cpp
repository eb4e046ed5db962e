// The engine on the host target.
#include "host/engine_impl.hpp"
#include "host/target_host.hpp"

namespace deep_comm {

template class Engine<HostTarget>;

}  // namespace deep_comm
