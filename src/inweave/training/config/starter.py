"""A starter configuration: `inweave train --init`.

What was chosen is set; every other setting is a comment with its default, so that the file shows all there is. Without
its "# ", each such line is valid by itself, except where a setting has no default.
"""

from __future__ import annotations

from inweave.training.config.fields import setting_facts
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import format_toml_value

_WIDTH = 44  # of a setting, before what it means
_HEAD = """\
# A training run of inweave. Lines without # are set; lines with # show every other setting at its default, which the
# model's preset may replace (docs/training.md). Check it with: inweave train FILE --check
"""


def starter_toml(config: TrainConfig) -> str:
    """Return the configuration as TOML with all settings, each with what it means."""
    groups: dict[str, list[str]] = {}
    for name, field in TrainConfig.model_fields.items():
        chosen = name in config.model_fields_set
        value = getattr(config, name) if chosen or field.is_required() else field.default
        setting = f"{name} =" if value is None else f"{name} = {format_toml_value(value)}"
        line = setting if chosen or field.is_required() else f"# {setting}"
        groups.setdefault(setting_facts(name)["group"], []).append(f"{line:<{_WIDTH}} # {field.description}")
    return "\n".join([_HEAD, *(f"# --- {group} ---\n" + "\n".join(lines) + "\n" for group, lines in groups.items())])
