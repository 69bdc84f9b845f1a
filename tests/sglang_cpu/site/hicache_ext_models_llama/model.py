"""The one model that a test engine needs: SGLang then skips the import of all others (SGLANG_EXTERNAL_MODEL_PACKAGE)."""

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = [LlamaForCausalLM]
