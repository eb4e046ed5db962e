"""How many SMs, chunks and slots a call of normal mode gets that names none."""

from __future__ import annotations

from deep_comm import config as configs
from deep_comm import env
from deep_comm.config import Config
from deep_comm.context import Context
from deep_comm.tuning import DefaultConfig


class _DefaultNumSms(int):
    """Tells "nobody has chosen" from the same number chosen."""


DEFAULT_NUM_SMS = _DefaultNumSms(20)
RECOMMENDED = {
    "dispatch": configs.recommended_dispatch_config,
    "combine": configs.recommended_combine_config,
}


class DefaultConfigs:
    """The part of a Buffer that chooses them, in the order of docs/guide/sms.md."""

    num_sms: int = DEFAULT_NUM_SMS
    """SMs of the recommended configs; see set_num_sms. Until it is set, calls without a Config get
    as many as was measured to be best, or a model says (docs/guide/sms.md).
    """

    _context: Context
    _is_internode: bool

    def _choose_defaults(self) -> None:
        """When the Buffer is built."""
        self._env_num_sms = env.NUM_SMS.get()
        self._has_defaults = self._env_num_sms is None and (
            self._context.device.type != "cpu" or bool(self._context.tuned)
        )
        self._defaults = {
            operation: DefaultConfig(
                operation,
                recommended,
                self._context.tuned,
                self._context.num_ranks,
                self._context.backend.max_sms,
            )
            for operation, recommended in RECOMMENDED.items()
        }

    def _default_config(self, recommended: configs.Recommend) -> Config:
        """Where the rows are not known."""
        num_sms = self._env_num_sms
        if self._context.device.type == "cpu":
            return configs.host_default(num_sms)
        max_sms = self._context.backend.max_sms
        if num_sms is None:
            wanted = self.num_sms  # of this Buffer, of its class, or of all
            num_sms = wanted if max_sms is None else min(wanted, max_sms)
        return recommended(self._context.num_ranks, num_sms)

    def _names_sms(self) -> bool:
        """Whether somebody has said how many SMs a call without a Config may have."""
        return not self._has_defaults or self.num_sms is not DEFAULT_NUM_SMS

    def _default(self, operation: str) -> Config | DefaultConfig:
        """For "dispatch" or "combine" without a config: docs/guide/sms.md."""
        if self._has_defaults and self.num_sms is DEFAULT_NUM_SMS and not self._is_internode:
            return self._defaults[operation]
        return self._default_config(RECOMMENDED[operation])
