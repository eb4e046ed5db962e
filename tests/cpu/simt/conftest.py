import pytest


@pytest.fixture(params=["direct", *(f"seed {seed}" for seed in range(6))])
def machine(request: pytest.FixtureRequest) -> str:
    """Of simt_machine.run_on."""
    return request.param
