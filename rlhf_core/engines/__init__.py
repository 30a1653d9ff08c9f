"""vLLM and DeepSpeed behind narrow classes."""
