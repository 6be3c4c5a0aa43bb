"""OpenVINO GenAI in int4, timed in an environment without qllm.

    python openvino_rate.py FOLDER THREADS

The environment has openvino-genai, nncf, optimum-intel and torch. FOLDER has the config.json of a
model; its weights are seeded noise, which optimum exports and nncf rounds to int4 in groups of 128,
experts, linears, head and embedding. Exporting holds the bf16 model in memory twice.
Questions and answers: `answering.py`.
"""

import gc
import shutil
import sys
from pathlib import Path
from typing import Any

from answering import answer

GROUP, SEED, SPREAD = 128, 1, 0.02
AT_ONCE = 1 << 24


def write_plain(folder: Path, out: Path) -> None:
    """Write a checkpoint in bf16 of the folder's config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.eos_token_id = None
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), AT_ONCE):
            some = flat[start : start + AT_ONCE]
            some.fill_(1.0) if "norm" in name else some.normal_(0, SPREAD)
    model.save_pretrained(out)


def make(folder: Path) -> Path:
    """Export the model for OpenVINO, and return its folder."""
    plain, wide, out = (folder / name for name in ("plain", "exported", "int4"))
    if (out / "openvino_model.xml").exists():
        return out
    write_plain(folder, plain)
    gc.collect()
    from optimum.exporters.openvino import main_export

    main_export(
        plain, wide, task="text-generation-with-past", library_name="transformers",
        model_loading_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    import nncf
    import openvino

    mode = nncf.CompressWeightsMode.INT4_SYM
    found = openvino.Core().read_model(wide / "openvino_model.xml")
    found = nncf.compress_weights(found, mode=mode, group_size=GROUP, ratio=1.0, all_layers=True)
    out.mkdir(exist_ok=True)
    for file in wide.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    openvino.save_model(found, out / "openvino_model.xml", compress_to_fp16=False)
    for folder in (plain, wide):
        shutil.rmtree(folder)
    return out


def main() -> None:
    """Answer until the input ends."""
    made = make(Path(sys.argv[1]))
    gc.collect()
    import numpy as np
    import openvino
    import openvino_genai

    pipe = openvino_genai.LLMPipeline(made, "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))

    def rates(prompt: list[int], tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt, and of a token after the first."""
        ids = np.array([prompt], dtype=np.int64)
        given = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        how: Any = openvino_genai.GenerationConfig()
        how.max_new_tokens, how.ignore_eos, how.do_sample = tokens, True, False
        how.eos_token_id, how.stop_token_ids = 0, set()
        times = pipe.generate(given, how).perf_metrics
        return times.get_ttft().mean / 1e3, times.get_tpot().mean / 1e3

    version = openvino_genai.__version__
    answer(rates, {"name": "OpenVINO GenAI", "version": version, "format": "int4 g128"})


if __name__ == "__main__":
    main()
