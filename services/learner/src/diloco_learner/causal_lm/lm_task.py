"""The task: a causal language model of ``transformers`` on conversations, or on text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diloco.errors import AdmissionError, SettingsError
from diloco.settings.run import TaskSettings
from diloco.storage import model_folder
from diloco_learner.causal_lm import modeling
from diloco_learner.causal_lm.lm_data import CausalLmData, open_data
from diloco_learner.causal_lm.options import CausalLmOptions
from diloco_learner.chats.chats import IGNORED, PackedRows
from diloco_learner.pytorch import names
from diloco_learner.task_api import Aux, Units
from diloco_learner.tensors import Tensor

TEMPERATURE = 0.7
CARRIED = (*model_folder.TOKENIZER_FILES, "generation_config.json")  # files that an exported model has beside its weights


def _total_loss(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies of all tokens that have a label, float32 []."""
    scores = module(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, :-1]
    targets = labels[:, 1:]
    learned = targets != IGNORED
    return nn.functional.cross_entropy(scores[learned].float(), targets[learned], reduction="sum")


class CausalLm:
    """A model of ``transformers`` with its data. Documents that share a row do not see each other.

    Raises:
        SettingsError: the model cannot be opened.
        AdmissionError: its tokenizer is not the run's.
    """

    units = Units("token", "nats per token")

    def __init__(self, settings: TaskSettings, data: str | None, options: CausalLmOptions) -> None:
        modeling.check_installed(options)
        self.settings, self.options, self._source = settings, options, data
        self.folder = model_folder.open_model(options.model)
        self._check_tokenizer()
        longest = self.folder.positions
        if longest is not None and settings.context > longest:
            raise SettingsError(
                f"task.context = {settings.context}: the model {options.model} was made for at most {longest} tokens: set a "
                "shorter task.context"
            )

    @cached_property
    def data(self) -> CausalLmData:
        """The data, which is opened where it is asked for first: an export needs none.

        Raises:
            SettingsError: the tokenizer is not the model's.
            DataError: it is missing, unreadable or too short.
            AdmissionError: the run's learners have other data.
        """
        found = open_data(self.settings, self._source, self.folder, self.options)
        words = self.folder.text_config.get("vocab_size")
        if isinstance(words, int) and found.vocabulary > words:
            raise SettingsError(
                f"--model {self.options.model}: its tokenizer has {found.vocabulary} tokens, but the model {words}: take the "
                "tokenizer that the model was trained with"
            )
        return found

    @property
    def mix(self) -> Any:
        """The data, of which all learners of the run have the same content."""
        return self.data.mix

    def _check_tokenizer(self) -> None:
        found, wanted = self.folder.tokenizer_digest(), self.options.tokenizer
        if wanted and found != wanted:
            raise AdmissionError(
                f"--model {self.options.model}: its tokenizer or chat template is not the run's ({found} here, "
                f"{wanted} there): "
                "take the model's folder as it was where the run was begun"
            )

    @property
    def tokens_per_batch(self) -> int:
        """The most tokens that a batch trains on."""
        return self.settings.batch * self.settings.context

    @property
    def rows_per_batch(self) -> int:
        """The rows of a batch."""
        return self.settings.batch

    def module(self) -> nn.Module:
        """Return the model as its folder has it, with a fresh adapter where one is trained.

        Raises:
            SettingsError: it cannot be loaded, or would let packed conversations see each other.
        """
        model = modeling.load(self.folder, self.options)
        modeling.check_documents_apart(model, self.options.model)
        return model

    def loss(self, module: nn.Module, batch: PackedRows) -> tuple[torch.Tensor, Aux]:
        """Return the mean cross-entropy in nats over the tokens that have a label, and how many these are."""
        device = next(module.parameters()).device
        tokens, labels, positions = (
            torch.as_tensor(batch[name], dtype=torch.long, device=device) for name in ("input_ids", "labels", "position_ids")
        )
        parts = [each.split(self.options.micro_batch or len(tokens)) for each in (tokens, labels, positions)]
        calls = [(module, *part) for part in zip(*parts, strict=True)]
        if len(calls) > 1 and torch.is_grad_enabled():
            totals = [checkpoint(_total_loss, *call, use_reentrant=False) for call in calls]
        else:
            totals = [_total_loss(*call) for call in calls]
        count = (labels[:, 1:] != IGNORED).sum()
        return torch.stack(totals).sum() / count.clamp(min=1), Aux(tokens=count)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[PackedRows]:
        """Yield packed rows of a share, arrays int32 [batch, context], from the ``start``-th batch on."""
        return self.data.batches(share, shares, seed, start)

    def validation(self) -> dict[str, list[PackedRows]]:
        """Return held-out packed rows by source, arrays int32 [batch, context]."""
        return self.data.validation()

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        """Return what a parameter is: a table of tokens, a head, a matrix or a vector."""
        if len(shape) < 2:
            return Tensor(kind="vector")
        return self._kinds.get(path, Tensor(kind="matrix"))

    @cached_property
    def _kinds(self) -> dict[str, Tensor]:
        found = {}
        heads = {id(head.weight) for head in [self._skeleton.get_output_embeddings()] if head is not None}
        for each in names.parameters_of(self._skeleton):
            if isinstance(each.owner, nn.Embedding):
                found[each.path] = Tensor(kind="embedding")
            elif id(each.tensor) in heads:
                found[each.path] = Tensor(kind="head")
            elif type(each.owner).__name__ == "Conv1D":  # GPT-2's kernels are (in, out)
                found[each.path] = Tensor(kind="matrix", output_axis=-1)
            elif each.tensor.ndim == 3:  # a stack of experts
                found[each.path] = Tensor(kind="matrix", output_axis=(0, 1))
        return found

    @cached_property
    def _skeleton(self) -> Any:
        return modeling.skeleton(self.folder, self.options)

    # ---- samples

    @property
    def prompt(self) -> str:
        """The text that samples continue where no other is given: the first of the run's prompts, or of the data."""
        return self.options.prompts[0] if self.options.prompts else self.data.prompt

    def sample(self, module: Any, count: int, *, prompt: str | None = None) -> str:
        """Return what the model answers to a prompt, or to each of the run's, in at most ``count`` tokens each."""
        if prompt is not None:
            return self._answer(module, prompt, count)
        first, *others = self.options.prompts or (self.data.prompt,)
        answers = [self._answer(module, first, count)]
        answers += [f"{other}{self._answer(module, other, count)}" for other in others]
        return "\n\n".join(answers)

    def _answer(self, module: Any, prompt: str, count: int) -> str:
        tokens = self.data.render_prompt(prompt)[-(self.settings.context - 1) :]
        if not len(tokens):
            raise SettingsError("prompt = '': the model continues a text of at least one token")
        seen = torch.as_tensor([list(map(int, tokens))], dtype=torch.long, device=next(module.parameters()).device)
        room = max(1, min(count, self.settings.context))
        drawn = module.generate(
            input_ids=seen,
            attention_mask=torch.ones_like(seen),
            max_new_tokens=room,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=self.data.end,
            eos_token_id=self.data.end,
        )
        return self.data.before_answer + self.data.decode([int(token) for token in drawn[0, seen.shape[1] :]])

    # ---- files

    def names(self) -> dict[str, str]:
        """Return the names that ``transformers`` gives to the trained tensors, by path."""
        trained = (each for each in names.parameters_of(self._skeleton) if each.tensor.requires_grad)
        return {each.path: each.name for each in trained}

    def config(self) -> dict[str, Any]:
        """Return the model's ``config.json``."""
        return dict(self.folder.config)

    def adapter_config(self) -> dict[str, Any] | None:
        """Return peft's ``adapter_config.json``; None: all weights are trained."""
        if not self.options.lora:
            return None
        config = self._skeleton.peft_config["default"].to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        return plain | {"base_model_name_or_path": self.options.model, "inference_mode": True}

    def files(self) -> dict[str, str]:
        """Return the files of the model's folder that an exported model has too, by name: its tokenizer and the like."""
        own = {name: str(self.folder.path / name) for name in CARRIED if (self.folder.path / name).is_file()}
        return own | ({model_folder.TEMPLATE: self.options.template} if self.options.template else {})
