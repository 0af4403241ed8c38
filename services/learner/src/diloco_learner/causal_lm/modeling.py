"""Models of ``transformers`` as a run trains them: loaded, adapted, and checked for packed rows."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from diloco.errors import DilocoError, SettingsError
from diloco.storage.model_folder import ALLOW_CODE, ModelFolder
from diloco_learner.causal_lm.options import EVERY_LINEAR, CausalLmOptions

NEEDED = ("transformers", "tokenizers")
PROBE_TOKENS = 8  # of each of two documents, by which a model is checked
PROBE_TOLERANCE = 1e-3  # of logits whose standard deviation is 1: kernels add up rows in another order
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "4bit": torch.bfloat16}


def check_installed(options: CausalLmOptions) -> None:
    """Find out that the libraries are there that a model needs.

    Raises:
        DilocoError: some are not; they are named.
    """
    needed = [*NEEDED, *(["peft"] if options.lora else [])]
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise DilocoError(f"--model {options.model}: not installed: {', '.join(missing)}; pip install 'diloco[finetune]'")


def check_code(folder: ModelFolder, options: CausalLmOptions) -> bool:
    """Return whether the folder's own Python code is to run.

    Each machine allows it by itself: a run's settings are another person's.

    Raises:
        SettingsError: the model needs it, and is not the one that is allowed to.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not folder.own_code or folder.config["model_type"] in CONFIG_MAPPING:
        return False
    if os.environ.get(ALLOW_CODE) == options.model:
        return True
    raise SettingsError(
        f"--model {options.model}: needs Python code of its own repository, which would run on this machine: read the code, "
        f"and allow it with --allow-code {options.model} ({ALLOW_CODE}={options.model} for a learner started by itself), or "
        "take a model that transformers has itself"
    )


def load(folder: ModelFolder, options: CausalLmOptions) -> torch.nn.Module:
    """Return the model to train, on the GPU if there is one, with an adapter if one is trained; raise as :func:`load_base`."""
    return prepared(load_base(folder, options, DTYPES[options.dtype], quantised=options.dtype == "4bit"), options)


def load_base(folder: ModelFolder, options: CausalLmOptions, dtype: torch.dtype, *, quantised: bool = False) -> Any:
    """Return the model that a folder has, its weights in a type; ``quantised``: its linear layers in 4 bits.

    Raises:
        SettingsError: transformers cannot read it, it lacks weights, or there is no GPU for 4 bits.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    given: dict[str, Any] = {"dtype": dtype, "trust_remote_code": check_code(folder, options)}
    if quantised:
        given |= _four_bits(options)
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder.path, local_files_only=True, output_loading_info=True, **given
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        first = str(error).strip().partition("\n")[0]
        raise SettingsError(f"--model {options.model}: transformers cannot load it: {type(error).__name__}: {first}") from None
    if found["missing_keys"]:
        names = ", ".join(sorted(found["missing_keys"])[:3])
        raise SettingsError(
            f"--model {options.model}: its files lack {names}, which transformers would make at random: take a model with a "
            "head for language modelling"
        )
    return model


def prepared(model: torch.nn.Module, options: CausalLmOptions) -> torch.nn.Module:
    """Return a loaded model as it is trained: on its device, and with the adapter that the options describe."""
    if torch.cuda.is_available() and options.dtype != "4bit":
        model = model.to("cuda")
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.lora:
            model.enable_input_require_grads()  # a frozen embedding would end the backward pass
    return _adapted(model, options) if options.lora else model


def _adapted(model: Any, options: CausalLmOptions) -> torch.nn.Module:
    """Return a model with a fresh adapter on its frozen weights.

    Raises:
        SettingsError: it has none of the layers that are to be adapted.
    """
    import peft

    if options.dtype == "4bit" and not next(model.parameters()).is_meta:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = peft.LoraConfig(
        r=options.lora,
        lora_alpha=options.scale,
        lora_dropout=options.lora_dropout,
        target_modules=EVERY_LINEAR if options.lora_targets == (EVERY_LINEAR,) else list(options.lora_targets),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what peft asks transformers for, which no user can change
            adapted: torch.nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        first = str(error).strip().partition("\n")[0]
        raise SettingsError(f"--lora targets={'+'.join(options.lora_targets)}: {first}") from None
    return adapted


def skeleton(folder: ModelFolder, options: CausalLmOptions) -> torch.nn.Module:
    """Return the model without values, on PyTorch's device ``meta``: its names and shapes, which take no memory."""
    import transformers

    own = check_code(folder, options)
    config = transformers.AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=own)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=own)
        return _adapted(model, options) if options.lora else model


def _four_bits(options: CausalLmOptions) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise SettingsError(
            f"--qlora: a base of 4 bits needs a GPU, and PyTorch finds none here: train --model {options.model} with --lora"
        )
    if find_spec("bitsandbytes") is None:
        raise DilocoError("--qlora: not installed: bitsandbytes; pip install bitsandbytes")
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


def check_documents_apart(model: torch.nn.Module, name: str) -> None:
    """Find out that documents of one row do not see each other in this model.

    transformers makes its masks by the positions, which begin at 0 with each document. A model with a memory of another kind,
    such as a recurrent state, would carry one document into the next.

    Raises:
        SettingsError: they do.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.arange(2 * PROBE_TOKENS, device=device)[None]
    positions = torch.arange(PROBE_TOKENS, device=device).repeat(2)[None]
    other = tokens.clone()
    other[:, :PROBE_TOKENS] += PROBE_TOKENS
    apart = False
    with torch.no_grad(), suppress(TypeError):  # of a model that takes no positions
        one, two = (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, PROBE_TOKENS:].float()
            for ids in (tokens, other)
        )
        apart = bool((one - two).abs().max() <= PROBE_TOLERANCE * one.std())
    model.train(training)
    if not apart:
        raise SettingsError(
            f"--model {name}: conversations that are packed into one row would see each other in this model, whose layers do "
            "not go by positions: take a model with attention only"
        )
