"""The algorithms: one file each, pure functions of tokens. `Algorithm` is the union that a config's `algorithm.type` chooses from."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megarl.algorithms.base import Loss, PolicyAlgorithm
from megarl.algorithms.cispo import Cispo
from megarl.algorithms.clip_cov import ClipCov
from megarl.algorithms.dapo import Dapo
from megarl.algorithms.deepseek_v32 import DeepSeekV32
from megarl.algorithms.dpo import Dpo
from megarl.algorithms.dppo import Dppo
from megarl.algorithms.dr_grpo import DrGrpo
from megarl.algorithms.gdpo import Gdpo
from megarl.algorithms.gmpo import Gmpo
from megarl.algorithms.grpo import Grpo
from megarl.algorithms.gspo import Gspo
from megarl.algorithms.kl_cov import KlCov
from megarl.algorithms.lite_ppo import LitePpo
from megarl.algorithms.luspo import Luspo
from megarl.algorithms.m2po import M2po
from megarl.algorithms.max_rl import MaxRl
from megarl.algorithms.opo import Opo
from megarl.algorithms.pass_at_k import PassAtK
from megarl.algorithms.ppo import ActorCritic, Ppo
from megarl.algorithms.raft import Raft
from megarl.algorithms.reinforce import Reinforce
from megarl.algorithms.reinforce_pp import ReinforcePp, ReinforcePpBaseline
from megarl.algorithms.remax import Remax
from megarl.algorithms.rloo import Rloo
from megarl.algorithms.sapo import Sapo
from megarl.algorithms.simpo import SimPo
from megarl.algorithms.spo import Spo
from megarl.algorithms.topr import Topr
from megarl.algorithms.vapo import Vapo
from megarl.algorithms.vc_ppo import VcPpo
from megarl.algorithms.vespo import Vespo
from megarl.algorithms.w_reinforce import WReinforce

Algorithm = Annotated[
    Ppo
    | VcPpo
    | Vapo
    | Grpo
    | Dapo
    | DrGrpo
    | Gspo
    | Gmpo
    | Cispo
    | Sapo
    | Rloo
    | Reinforce
    | Remax
    | ReinforcePp
    | ReinforcePpBaseline
    | LitePpo
    | Raft
    | Dppo
    | MaxRl
    | PassAtK
    | Gdpo
    | DeepSeekV32
    | Luspo
    | Vespo
    | Topr
    | Spo
    | ClipCov
    | KlCov
    | M2po
    | WReinforce
    | Opo,
    Field(discriminator="type"),
]


def _dpo_unless_said(given: Any) -> Any:
    return {"type": "dpo", **given} if isinstance(given, dict) else given


PreferenceLoss = Annotated[Dpo | SimPo, Field(discriminator="type"), BeforeValidator(_dpo_unless_said)]

__all__ = ["ActorCritic", "Algorithm", "Dpo", "Loss", "PolicyAlgorithm", "PreferenceLoss"]
