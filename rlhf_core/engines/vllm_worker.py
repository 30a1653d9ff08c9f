"""What runs inside every vLLM worker: receiving weights, and the noise of sampling.

Loaded by vLLM through ``worker_extension_cls`` and mixed into its worker class. The names carry the prefix ``rlhf_``
because vLLM refuses an extension whose attributes clash with the worker's own.

Live models are updated with vLLM's layerwise reload, never with a bare ``load_weights``: on CPU the linear weights were
repacked for the kernels and have lost their loaders, and on mixture-of-experts models a second bare load corrupts silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_core.engines.weights import BucketSpec, WeightsDigest, unpack
from rlhf_core.errors import IntegrityError
from rlhf_core.seeds import draw_seeds

if TYPE_CHECKING:
    from torch import Tensor


class PolicyReceiver:
    """Mixed into vLLM's worker; the annotated attributes are the worker's."""

    model_runner: Any
    vllm_config: Any
    device: Any

    def rlhf_begin_update(self) -> None:
        """Open a weight update. The model must not serve until it is finished."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        with self._rlhf_context():
            if getattr(self, "rlhf_updating", False):
                # An update was cut off. Its half-loaded layers would swallow the new weights unseen: close it first.
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            initialize_layerwise_reload(model)
        self.rlhf_digest, self.rlhf_updating = WeightsDigest(), True

    def rlhf_load_bucket(self, spec: BucketSpec, payload: Any) -> None:
        """Load one packed bucket. ``payload`` is a uint8 numpy array, or a CUDA IPC handle (rebuild function, arguments)."""
        flat = self._rlhf_open(payload)
        items = list(unpack(spec, flat))
        for name, tensor in items:
            self.rlhf_digest.add(name, tensor)
        with self._rlhf_context():
            self.model_runner.get_model().load_weights(items)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def rlhf_finish_update(self) -> str:
        """Close the update; returns the digest of everything that was received."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with self._rlhf_context():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            self._rlhf_repack_tied_head(model)
        self.rlhf_updating = False
        if not self.rlhf_digest.checksums:
            raise IntegrityError("a weight update was finished without a single bucket")
        return self.rlhf_digest.hexdigest()

    def rlhf_draw_by_position(self) -> None:
        """On a CPU, let every draw be a function of the sample's stream, the position and the token id, without any state.

        vLLM's newer model runner, which is the usual one on a GPU, does that by itself. The older one keeps a generator for
        each request instead, and a CPU's generator cannot be turned back as it wants when a prompt is read in parts.
        """
        if self.device.type != "cpu" or self.vllm_config.use_v2_model_runner:
            return
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        runner = self.model_runner
        sampler = runner.sampler.topk_topp_sampler
        without_streams = sampler.forward

        def draw(logits_NV: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Tensor | None]:
            batch = runner.input_batch
            streams = [runner.requests[name].sampling_params.seed for name in batch.req_ids]
            if all(stream is None for stream in streams):
                return without_streams(logits_NV, generators, k, p)
            if None in streams or len(streams) != len(logits_NV):
                raise IntegrityError(f"{len(logits_NV)} tokens are to be drawn from the streams {streams}")
            batch.generators.clear()
            seeds_N = draw_seeds(np.asarray(streams), batch.num_tokens_no_spec[: len(streams)])
            logits_NV = apply_top_k_top_p(logits_NV, k, p)
            tokens_N = torch.ops._C.fused_gumbel_argmax(logits_NV.float(), torch.from_numpy(seeds_N))
            return tokens_N, logits_NV.log_softmax(dim=-1, dtype=torch.float32)

        sampler.forward = draw

    @staticmethod
    def _rlhf_repack_tied_head(model: Any) -> None:
        """Renew the copy of a tied output layer's weight that vLLM keeps, repacked for its kernels, on CPU.

        A checkpoint with tied embeddings has no weight of its own for that layer, so the layerwise reload puts the shared
        (updated) weight back but never processes it again: the logits would still come from the old weights.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def _rlhf_context(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)

    def _rlhf_open(self, payload: Any) -> Tensor:
        device: torch.device = self.device
        if isinstance(payload, tuple):
            rebuild, arguments = payload
            arguments = list(arguments)
            arguments[6] = device.index or 0  # the sender's device index means nothing in this process
            # A copy: layers keep what they were given until all of their parts have arrived, which may be in a later
            # bucket, and the sender reuses the memory behind the handle.
            return rebuild(*arguments).clone()
        # Copied on a CPU too, for the same reason; and arrays out of Ray's object store cannot be written to.
        return torch.from_numpy(payload.copy()).to(device)
