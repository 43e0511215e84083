"""What the settings of all algorithms, corrections and stages have in common."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen settings. Unknown keys and non-finite numbers are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
