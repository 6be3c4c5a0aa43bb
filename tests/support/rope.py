"""Models with every kind of position embedding."""

import copy
from typing import Any

import pytest

from tests.support.families import DTYPES, MAKERS, make_model

ORIGINAL = 64

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
    "factor": 8.0,
}

MSCALES = {"short_mscale": 1.0, "long_mscale": 1.4}  # Phi-3.5-MoE reads them

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe-longrope": (
        "phimoe",
        {
            "rope_parameters": {**LONGROPE, **MSCALES},
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "mixtral-longrope": ("mixtral", {"rope_parameters": LONGROPE}),
    "mixtral-dynamic": (
        "mixtral",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL},
    ),
}


def model_of(kind: str, dtype: str = "fp32") -> Any:
    family, changes = KINDS[kind]
    make_config, make = MAKERS[family]
    config = make_config()
    made = type(config)(**{**config.to_dict(), **copy.deepcopy(changes)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAKERS, family, (lambda: made, make))
        return make_model(family, DTYPES[dtype])
