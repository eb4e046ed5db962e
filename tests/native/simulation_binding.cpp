// The same binding as in _core, for this module's own copy of the executor.
#include "bind/bind_simulation.cpp"  // NOLINT(bugprone-suspicious-include)
