"""Build the stages of `local.upload`, and check them before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from raysim.config.references import load_object
from raysim.config.schema import Config
from raysim.config.sections.base import Named, with_value
from raysim.errors import ConfigError, ContractError
from raysim.models.comparison import same_values
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.errors.keyed_numbers import RANDOM_NUMBERS_PAGE, RNG_ARGUMENT, keyed_numbers_only
from raysim.rules.errors.user_code import translate_errors
from raysim.rules.methods.parameters import build_part
from raysim.rules.upload_stages import STAGES, UploadStage, WireFormat
from raysim.rules.uploads import Upload, declared
from raysim.spelling import did_you_mean
from raysim.training.uploads.upload_chain import check_encoded, check_wire_format


def make_stages(key: str, section: Sequence[Named]) -> tuple[UploadStage, ...]:
    """Return the stages that a configuration names, in order.

    Args:
        key: configuration key of the stages, such as `local.upload`.
        section: the section under that key, one entry for each stage.

    Raises:
        ConfigError: a name is unknown, or a parameter is wrong; names the key.
    """
    return tuple(
        build_part(f"{key}.{i}", _stage_class(f"{key}.{i}", named.name), named.parameters)
        for i, named in enumerate(section)
    )


def _stage_class(key: str, name: str) -> type[UploadStage]:
    """Return the class of a stage."""
    if ":" not in name:
        if name not in STAGES:
            raise ConfigError(
                f"{key}.name: unknown stage '{name}'{did_you_mean(name, STAGES)}; your own is "
                "given as path.py:Class"
            )
        return STAGES[name]
    cls = load_object(name, f"{key}.name")
    if not (isinstance(cls, type) and issubclass(cls, UploadStage)):
        raise ConfigError(f"{key}.name: '{name}' is not a subclass of raysim.rules.UploadStage")
    return cls


def check_stages(
    upload_key: str,
    section: Sequence[Named],
    client: ClientRule,
    server: ServerRule,
    stages: Sequence[UploadStage],
    model: Model,
) -> None:
    """Check that the stages fit the rules, and run users' stages on a random update.

    Args:
        upload_key: configuration key of the stages, such as `local.upload`.
        section: the section under that key, one entry for each stage.
        client: the client rule.
        server: the server rule.
        stages: the stages that `make_stages` returned for that section.
        model: the net.

    Raises:
        ConfigError: a stage names an upload that it cannot change, or fails; names the key.
    """
    for i, (stage, named) in enumerate(zip(stages, section, strict=True)):
        key = f"{upload_key}.{i}"
        stage = stage.at_shapes(model.shapes)
        if stage.error_feedback and not stage.contracts:
            raise ConfigError(
                f"{key}.error_feedback: not with stage '{named.name}', whose error can be larger "
                f"than the update, so that the memory would grow; leave it out, or the stage's key "
                "unbiased or scaled, or use topk"
            )
        if stage.of is not None:
            _check_upload(f"{key}.of", stage.of, client, server)
        if ":" in named.name:
            _try_stage(key, stage, model)


def _check_upload(key: str, upload: str, client: ClientRule, server: ServerRule) -> None:
    """Refuse an upload that a stage cannot change."""
    if upload not in server.uploads:
        raise ConfigError(
            f"{key}: server rule '{server.name}' receives no '{upload}' from client rule "
            f"'{client.name}'{did_you_mean(upload, server.uploads)}"
        )
    if not declared(client.sends).get(upload, Upload()).is_summable:
        raise ConfigError(
            f"{key}: '{upload}' of client rule '{client.name}' are integers, which no stage can "
            "change; name an upload of floats"
        )


def _try_stage(key: str, stage: UploadStage, model: Model) -> None:
    """Run a user's stage twice on a random update."""
    numbers = generator(0, "dry run").standard_normal(model.size)
    update = torch.from_numpy(numbers).to(model.dtype)
    before_call = update.clone()
    name = type(stage).__name__

    def failed(text: str) -> ConfigError:
        return ConfigError(f"{key}.name: {name} failed on a random update: {text}")

    def unkeyed(drawn: str) -> ConfigError:
        return ConfigError(f"{key}: {name} {drawn}, {RNG_ARGUMENT} {RANDOM_NUMBERS_PAGE}")

    try:
        with translate_errors(failed), keyed_numbers_only(unkeyed):
            decoded = stage.encode(update, generator(0, "stage"))
            check_encoded(stage, key, update, decoded)
            # Another update between, since a stage that keeps a mean of what it sees would give the
            # same twice in a row.
            stage.encode(0.5 * before_call.flip(0), generator(1, "stage"))
            again = stage.encode(before_call.clone(), generator(0, "stage"))
            if not torch.isfinite(decoded).all():
                raise ConfigError(
                    f"{key}: encode of {name} returns numbers that are not finite for a finite "
                    "update"
                )
            before = WireFormat(model.size, 8 * update.element_size())
            check_wire_format(stage, key, stage.wire_format(before, decoded))
        if not same_values(update, before_call):
            raise ConfigError(
                f"{key}: encode of {name} changes the update in place, so that what it removes is "
                "not known; return a new tensor"
            )
        if not same_values(decoded, again):
            raise ConfigError(
                f"{key}: encode of {name} returns something else for the same update and "
                "generator, as with an attribute or a generator of its own, which workers do not "
                f"share; use only its arguments {RANDOM_NUMBERS_PAGE}"
            )
    except ContractError as error:
        raise ConfigError(str(error)) from None


def with_stage_parameters(config: Config, stages: Mapping[str, Sequence[UploadStage]]) -> Config:
    """Return the configuration with every parameter of its stages written out.

    Args:
        config: the configuration of the run.
        stages: its stages, by their configuration keys.
    """
    for key, named in config.uploads.items():
        sections = tuple(
            Named.model_validate({"name": section.name, **asdict(stage)})
            for section, stage in zip(named, stages[key], strict=True)
        )
        config = with_value(config, key, sections)
    return config
