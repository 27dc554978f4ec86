"""llama.cpp as a contender: write a Mamba model as GGUF, and run it by the wheel `xllamacpp`.

The file is written with `gguf`, from the weights of the model that it is compared with. Its tokens are numbers as text,
since only token ids go in and out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

CONTEXT = 4096
FORMATS = {"float32": "F32", "q8_0": "Q8_0"}  # our names, and those of gguf.GGMLQuantizationType


def write_gguf(model: Any, path: Path, weights: str) -> None:
    """Write transformers' `MambaForCausalLM` to `path`; `weights` is "float32" or "q8_0".

    As in llama.cpp's own quantization, the convolution, the norms and vectors stay in float32.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(int(config.time_step_rank))
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_dt_b_c_rms(False)
    _add_vocabulary(writer, config.vocab_size)
    kind = gguf.GGMLQuantizationType[FORMATS[weights]]
    for name, tensor, is_matrix in _tensors(model):
        numbers = tensor.detach().float().numpy()
        if is_matrix and kind != gguf.GGMLQuantizationType.F32 and numbers.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, size: int) -> None:
    import gguf

    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"▁{i}" for i in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_add_bos_token(False)


def _tensors(model: Any) -> list[tuple[str, Tensor, bool]]:
    """List names, tensors and whether they are matrices of the model."""
    backbone = model.backbone
    found = [
        ("token_embd.weight", backbone.embeddings.weight, True),
        ("output_norm.weight", backbone.norm_f.weight, False),
    ]
    for i, block in enumerate(backbone.layers):
        mixer, prefix = block.mixer, f"blk.{i}"
        found += [
            (f"{prefix}.attn_norm.weight", block.norm.weight, False),
            (f"{prefix}.ssm_in.weight", mixer.in_proj.weight, True),
            (f"{prefix}.ssm_conv1d.weight", mixer.conv1d.weight.squeeze(1), False),
            (f"{prefix}.ssm_conv1d.bias", mixer.conv1d.bias, False),
            (f"{prefix}.ssm_x.weight", mixer.x_proj.weight, True),
            (f"{prefix}.ssm_dt.weight", mixer.dt_proj.weight, True),
            (f"{prefix}.ssm_dt.bias", mixer.dt_proj.bias, False),
            (f"{prefix}.ssm_a", -mixer.A_log.exp(), False),
            (f"{prefix}.ssm_d", mixer.D, False),
            (f"{prefix}.ssm_out.weight", mixer.out_proj.weight, True),
        ]
    return found


class LlamaServer:
    """A model in llama.cpp, with `threads` threads."""

    def __init__(self, path: Path, threads: int) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx, parameters.n_parallel, parameters.verbosity = CONTEXT, 1, -1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.warmup = True
        self._server = xllamacpp.Server(parameters)

    def complete(self, prompt: list[int], new: int, top: int = 0) -> dict[str, Any]:
        """Continue a prompt greedily by `new` tokens; return the server's answer with its timings."""
        request = {
            "prompt": prompt, "n_predict": new, "temperature": 0.0, "top_k": 1, "cache_prompt": False,
            "ignore_eos": True, "return_tokens": True, "n_probs": top,
        }  # fmt: skip
        answer = self._server.handle_completions(request)
        if "error" in answer or "timings" not in answer:
            raise RuntimeError(f"llama.cpp must answer with timings, got {str(answer)[:300]}")
        return answer
