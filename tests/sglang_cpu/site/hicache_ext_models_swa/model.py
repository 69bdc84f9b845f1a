"""A Llama whose even layers attend to a sliding window only: the smallest model with an SWA pool."""

from sglang.srt.models.llama import LlamaForCausalLM


class HicacheExtSwaForCausalLM(LlamaForCausalLM):
    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        for is_sliding, layer in zip(config.hybrid_layer_pattern, self.model.layers, strict=True):
            if is_sliding:
                layer.self_attn.attn.sliding_window_size = self.get_attention_sliding_window_size()

    def get_attention_sliding_window_size(self):
        return self.config.sliding_window - 1  # SGLang does not count the token itself


EntryClass = [HicacheExtSwaForCausalLM]
