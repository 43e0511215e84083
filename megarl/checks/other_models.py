"""The checks of a run's models other than the policy: `model.base`, critic, teacher, reward model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.checks.data import looked_at
from megarl.config import (
    ConfigError,
    CriticSettings,
    DistillationSettings,
    EnvironmentSettings,
    Layout,
    ModelReward,
    ModelSettings,
    RolloutSettings,
    TeacherEngines,
    TeacherServer,
    TrainConfig,
    model_of,
)
from megarl.data.gym import all_drawn
from megarl.data.prompts import Prompt
from megarl.data.teacher_prompts import TeacherPrompts
from megarl.data.tokenizer import check_same_tokenizer, load_tokenizer
from megarl.engines.engine import as_rollout
from megarl.engines.registry import check_engine
from megarl.engines.teacher_server import check_server
from megarl.host.unchecked import where_present
from megarl.models.adapters import adapted
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_layout, check_room
from megarl.models.family import HeadKind
from megarl.models.hf import end_tokens
from megarl.models.image_processor import ImageProcessor
from megarl.rewards.scale import read_range


def check_base(settings: ModelSettings, model: ModelDescription, rollout: RolloutSettings, environment: EnvironmentSettings | None) -> None:
    """Check `model.base`, from which the engines start: a sync replaces its weights, but all else stays with them for the whole run.

    Args:
        settings: the section `model`.
        model: the model of `model.path`.
        rollout: the section `rollout`, which has the lengths.
        environment: the section `environment`, if there is one.

    Raises:
        ConfigError: the model is incomplete, its shape is not the policy's, or its responses would end or be tokenised differently.
    """
    base, path = settings.base, settings.path
    if base is None:
        return
    base_model = check_checkpoint(base, key="model.base", mtp=settings.mtp and "drop", drop_images=settings.drop_images)
    if base_model.config["architectures"] != model.config["architectures"]:
        raise ConfigError(f"model.base: {base} has a different architecture from model.path={path}")
    left, right = _engine_inputs(base_model), _engine_inputs(model)
    for what in [*right, *left]:
        if left.get(what) != right.get(what):
            raise ConfigError(f"model.base: {what} is {left.get(what)!r} in {base} and {right.get(what)!r} in model.path={path}")
    check_room(base_model, rollout.max_prompt_tokens + rollout.max_response_tokens, f"model.base: {base}")
    with where_present("the tokenizer of model.base"):
        check_same_tokenizer(base, "model.base", path, "model.path")
        # The driver renders prompts from model.path; the engine's process renders an environment's messages from model.base.
        if environment is not None and load_tokenizer(base).chat_template != load_tokenizer(path).chat_template:
            raise ConfigError(f"model.base: its chat template, which renders what the environment says, is another than that of {path}")


def check_critic(
    settings: ModelSettings, model: ModelDescription, rollout: RolloutSettings, critic: CriticSettings | None, layout: Layout
) -> None:
    """Check the critic, if the run has one: the policy's model, or that of `critic.path`.

    Args:
        settings: the section `model`.
        model: the policy.
        rollout: the section `rollout`, which has the lengths.
        critic: the section `critic`, if there is one.
        layout: the layout of the ranks that will hold it.
    """
    if critic is None:
        return
    if critic.path is None:
        check_layout(model, layout, settings.megatron)
    else:
        check_other_model(settings, rollout, critic.path, "critic.path", layout, "value")
        if settings.lora is not None:
            adapted(ModelDescription.read(critic.path, drop_images=settings.drop_images), settings.lora, "value")


def check_teacher(
    settings: ModelSettings,
    policy: ModelDescription,
    rollout: RolloutSettings,
    distillation: DistillationSettings | None,
    place: Layout | TeacherEngines,
    *,
    gpu: bool,
) -> None:
    """Check the teachers, if the run has any. They may be of other sizes and families.

    Args:
        settings: the section `model`.
        policy: the policy.
        rollout: the section `rollout`, which has the lengths.
        distillation: the section `distillation`, if there is one.
        place: the layout of the ranks that will hold the models, or the engines that will.
        gpu: `cluster.gpus`.

    Raises:
        ConfigError: starting with the setting that names a teacher: it is incomplete, the layout does not divide it, no such engine can
            run it, its tokenizer differs from the policy's, its vocabulary lacks tokens of the policy's, or its context is too short.
    """
    if distillation is None:
        return
    for name, path in distillation.models.items():
        key = f"distillation.{name}"
        if isinstance(place, Layout):
            teacher = check_other_model(settings, rollout, path, key, place, "lm")
        else:
            teacher = check_other_model(settings, rollout, path, key, None, "lm", more=1)  # an engine samples a token after a text
            engine = as_rollout(place, rollout.max_prompt_tokens + rollout.max_response_tokens)
            try:
                check_engine(teacher, place.dtype or settings.dtype, engine, gpu=gpu)
            except ConfigError as error:
                raise ConfigError(
                    str(error).replace("rollout.", "placement.teacher_engines.").replace("model.path", f"{key}: {path}")
                ) from None
        if teacher.vocab < policy.vocab:
            raise ConfigError(f"{key}: {path} has vocab_size={teacher.vocab}, but the policy samples from vocab_size={policy.vocab}")
    for name, server in distillation.scorers.items():
        if isinstance(server, TeacherServer):
            longest = rollout.max_prompt_tokens + rollout.max_response_tokens
            check_server(server, f"distillation.{name}", settings.path, distillation.top_k or 0, longest)
    if distillation.top_k is not None and distillation.top_k >= policy.vocab:
        raise ConfigError(
            f"distillation.top_k={distillation.top_k}: the policy has vocab_size={policy.vocab}, and other tokens must be left"
        )


def check_seen(config: TrainConfig, policy: ModelDescription, prompts: Sequence[Prompt], held_out: Sequence[Sequence[Prompt]] = ()) -> None:
    """Check that every model reads the images of prompts, by up to 10,000 prompts, evenly spaced, and of environments, which may show some.

    Args:
        config: the run's configuration.
        policy: the policy.
        prompts: those that are trained on.
        held_out: of each set, those that are evaluated on, by critic and reward model alone.

    Raises:
        ConfigError: a teacher scores texts alone, or another model does not see what the policy sees, of the same tokens.
    """

    def shows(several: Sequence[Prompt]) -> bool:
        return any(prompt.images for prompt in looked_at(several))

    if policy.sizes.vision is None:
        return
    trained = config.environment is not None or shows(prompts)
    if not trained and not any(map(shows, held_out)):
        return
    distillation = config.distillation
    models = {"critic.path": None if config.critic is None else config.critic.path}
    if trained:
        models["model.base"] = config.model.base
    if trained and distillation is not None:
        models |= {f"distillation.{name}": path for name, path in distillation.models.items()}
        if any(isinstance(one, TeacherServer) for one in distillation.scorers.values()):
            raise ConfigError(
                "distillation: the images of prompts or an environment reach no server of a teacher: give it ranks or engines"
            )
    if (source := model_of(config.reward.source)) is not None:
        models[f"{source[0]}.path"] = source[1].path
    cut = _cut(config.model, config.model.path)
    for key, path in models.items():
        if path is not None and _cut(config.model, path) != cut:
            raise ConfigError(f"{key}: {path} does not see images of the same tokens as the policy, and prompts or answers have some")


def _cut(settings: ModelSettings, path: Path) -> dict[str, int] | None:
    """Return the numbers that determine the tokens of an image for a model in this directory; None if it sees none."""
    vision = ModelDescription.read(path, drop_images=settings.drop_images).sizes.vision
    return None if vision is None else {**ImageProcessor(path, settings.min_pixels, settings.max_pixels).cut, "token": vision.image_token}


def check_taught(distillation: DistillationSettings | None, prompts: Sequence[Prompt]) -> None:
    """Check that prompts have a teacher each and teachers have prompts, by up to 10,000 prompts, evenly spaced.

    Those that are left out here are checked when they are drawn.

    Raises:
        ConfigError: a prompt's source has no teacher, or all prompts were looked at and a teacher has none.
    """
    if distillation is None or not distillation.by_source:
        return
    looked = looked_at(prompts)
    taught = {distillation.taught_by(prompt.meta, prompt.name) for prompt in looked}
    idle = [name for number, name in enumerate(distillation.scorers) if number not in taught]
    if idle and all_drawn() and len(looked) == len(prompts):
        raise ConfigError(f"distillation.{idle[0]}: no prompt of data.train is of a source that this teacher is for")


def check_shown(config: TrainConfig, prompts: Sequence[Prompt]) -> None:
    """Check what the teacher reads in the place of prompts, by up to 10,000 prompts, evenly spaced.

    Raises:
        ConfigError: as `TeacherPrompts.check` does.
    """
    made = TeacherPrompts.of(config)
    if made is not None:
        made.check(looked_at(prompts))


def check_reward_model(settings: ModelSettings, rollout: RolloutSettings, source: tuple[str, ModelReward] | None, layout: Layout) -> None:
    """Check the reward model, if the run has one.

    Args:
        settings: the section `model`.
        rollout: the section `rollout`, which has the lengths.
        source: the result of `model_of`.
        layout: the layout of the ranks that will hold it.
    """
    if source is None:
        return
    key, path = f"{source[0]}.path", source[1].path
    check_other_model(settings, rollout, path, key, layout, "value")
    check_trained_head(path, key)
    read_range(path, key)


def check_other_model(
    policy: ModelSettings, rollout: RolloutSettings, path: Path, key: str, layout: Layout | None, head: HeadKind, more: int = 0
) -> ModelDescription:
    """Check a critic, a reward model or a teacher against the policy. It may be of another size.

    Args:
        policy: the section `model`.
        rollout: the section `rollout`, which has the lengths.
        path: the model's Hugging Face directory.
        key: the setting that named it.
        layout: the layout of the ranks that will hold it; None: no ranks will.
        head: the head that it needs.
        more: how many more tokens than those of prompt and response it needs room for.

    Returns:
        The model.

    Raises:
        ConfigError: starting with `key`: the model is incomplete, the layout does not divide it, its tokenizer differs from the policy's,
            or its context is too short.
    """
    model = check_checkpoint(path, head=head, key=key, mtp=policy.mtp and "drop", drop_images=policy.drop_images)
    try:
        if layout is not None:
            check_layout(model, layout, policy.megatron)
    except ConfigError as error:
        raise ConfigError(f"{key}: {path}: {error}") from None
    with where_present(f"the tokenizer of {key}"):
        check_same_tokenizer(path, key, policy.path, "model.path")
    check_room(model, rollout.max_prompt_tokens + rollout.max_response_tokens + more, f"{key}: {path}")
    return model


def check_trained_head(path: Path, key: str) -> None:
    """ConfigError if the directory holds a language model: the scores of a fresh head are meaningless."""
    model = ModelDescription.read(path)
    if model.head != "value":
        raise ConfigError(f"{key}: {path} is a {model.architecture}, but a reward model needs a trained scalar head (`megarl rm`)")


def _engine_inputs(model: ModelDescription) -> dict[str, Any]:
    """What an engine reads from a directory besides weights, by name: tensor shapes, model dimensions, tokens that end a response."""
    shapes = {f"the shape of {name}": list(shape) for name, shape in model.expected().items()}
    return {"eos_token_id": sorted(end_tokens(model.directory)), **model.fields, **model.rope.meaning, **shapes}
