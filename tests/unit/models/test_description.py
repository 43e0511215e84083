"""A model is described once; the description is what other processes and checks without torch are given."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import ConfigError
from megarl.models.description import ModelDescription
from megarl.models.families import FAMILIES
from megarl.models.hf import read_config
from tests.published_models import MODELS, Published, config_of, description_of


@pytest.mark.parametrize("published", MODELS.values(), ids=MODELS)
def test_another_process_is_given_the_same_model(published: Published) -> None:
    model = description_of(published)
    assert model.sizes and model.fields  # what is already derived does not travel
    sent = pickle.loads(pickle.dumps(model))
    assert sent == model and sent.family is model.family and sent.fields == model.fields
    assert len(pickle.dumps(model)) < 4_000


def test_a_directory_is_what_its_config_says(tiny_model: Path) -> None:
    model = ModelDescription.read(tiny_model)
    assert model.config == read_config(tiny_model) and model.directory == tiny_model and model.family is FAMILIES[model.architecture]
    assert pickle.loads(pickle.dumps(model)).directory == tiny_model
    assert model.vocab == model.sizes.vocab and model.head == "lm" and set(model.expected()) == set(model.update("bfloat16"))


def test_what_a_config_leaves_out_has_its_default() -> None:
    full = config_of(MODELS["DeepSeek-V3"])
    sparse = {key: value for key, value in full.items() if key != "scoring_func"}
    assert ModelDescription.of(sparse).config == full and "scoring_func" not in sparse


def test_a_model_of_no_known_family_has_no_description() -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: architecture 'NobodysForCausalLM' is not supported \(supported: "):
        ModelDescription.of({"architectures": ["NobodysForCausalLM"]})


def test_a_description_needs_no_torch() -> None:
    code = (
        "import sys; from tests.published_models import *; model = description_of(MODELS['DeepSeek-V3']);"
        "assert model.fields and model.update('bfloat16') and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
