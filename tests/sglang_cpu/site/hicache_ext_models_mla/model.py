"""The one model that a test engine needs: SGLang then skips the import of all others (SGLANG_EXTERNAL_MODEL_PACKAGE)."""

from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM

EntryClass = [DeepseekV2ForCausalLM]
