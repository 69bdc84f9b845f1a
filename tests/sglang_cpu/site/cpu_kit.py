"""CPU stand-ins for the parts of SGLang 0.5.23 that need an accelerator, applied as its modules are imported."""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types


def install():
    """Arrange that each module named in PATCHES is patched right after its import. Idempotent."""
    if not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self):
        self._busy = set()

    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.configs":
            stand_in_for_torchvision()
        patch = PATCHES.get(name)
        if patch is None or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None:
            spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, inner, patch):
        self._inner, self._patch = inner, patch

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        self._patch(module)


def stand_in_for_torchvision():
    """Let SGLang's module-level imports of torchvision succeed; transformers is told that it is absent."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    import transformers.utils.import_utils as probe

    probe.is_torchvision_available()  # answered and cached before the stand-in exists
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    modules = [types.ModuleType(n) for n in names]
    for name, module in zip(names, modules, strict=True):
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
    modules[0].transforms, modules[1].functional = modules[1], modules[2]
    for module in modules[1:]:
        module.InterpolationMode = types.SimpleNamespace(
            NEAREST="nearest", BILINEAR="bilinear", BICUBIC="bicubic", LANCZOS="lanczos"
        )


def unpinned(cls):
    """Make ``pin_memory`` False whatever the caller says."""
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    cls.__init__ = init


def host_rows(pool, buffer, layer, slots):
    """The view of one layer of a host buffer and the index that picks token ``slots`` in it."""
    if pool.layout == "layer_first":
        return buffer[layer], (slots,)
    if pool.layout == "page_first":
        return buffer[:, layer], (slots,)
    if pool.layout == "page_first_direct":
        return buffer[:, layer], (slots // pool.page_size, slots % pool.page_size)
    raise ValueError(f"no CPU copy for layout {pool.layout}")


def patch_mha(module):
    def sides(self, layer):
        return (self.k_buffer, self.device_k_buffers[layer]), (self.v_buffer, self.device_v_buffers[layer])

    def load(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
        if is_draft or 0 <= layer_id < self.target_layer_num:
            for host, device in sides(self, layer_id):
                view, rows = host_rows(self, host, layer_id, host_indices.long())
                device[device_indices.long()] = view[rows].to(device.dtype)

    def backup(self, device_pool, host_indices, device_indices, io_backend):
        for layer in range(self.layer_num):
            for host, device in sides(self, layer):
                view, rows = host_rows(self, host, layer, host_indices.long())
                view[rows] = device[device_indices.long()].to(view.dtype)

    unpinned(module.MHATokenToKVPoolHost)
    for cls in (module.MHATokenToKVPoolHost, module.AsymmetricMHATokenToKVPoolHost):
        cls.load_to_device_per_layer, cls.backup_from_device_all_layer = load, backup


def patch_mla(module):
    cls = module.MLATokenToKVPoolHost

    def load(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
        if is_draft or layer_id in self._target_layer_indices:
            layer = self._host_layer_by_controller[layer_id]
            view, rows = host_rows(self, self.kv_buffer, layer, host_indices.long())
            device = self.device_kv_buffers[self._buffer_index_by_layer[layer_id]]
            device[device_indices.long()] = view[rows].view(-1, *device.shape[1:])

    def backup(self, device_pool, host_indices, device_indices, io_backend):
        for layer, device in enumerate(self.device_kv_buffers):
            view, rows = host_rows(self, self.kv_buffer, layer, host_indices.long())
            view[rows] = device[device_indices.long()].view(-1, *view.shape[len(rows) :])

    unpinned(cls)
    cls.load_to_device_per_layer, cls.backup_from_device_all_layer = load, backup


def patch_dsa(module):
    cls = module.DSAIndexerPoolHost

    def page_view(self, layer):
        whole = self.index_k_with_scale_buffer
        return whole[layer] if self.layout == "layer_first" else whole[:, layer, 0]

    def load(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
        if not is_draft and not self._is_device_layer_owned(device_pool, layer_id):
            return
        layer = self._draft_host_layer(layer_id) if is_draft else self._host_layer_index(layer_id)
        host_pages, device_pages = self._get_indexer_page_indices(host_indices, device_indices)
        device = device_pool.index_k_with_scale_buffer[0 if is_draft else layer_id]
        device[device_pages.long()] = page_view(self, layer)[host_pages.long()].view(-1, *device.shape[1:])

    def backup(self, device_pool, host_indices, device_indices, io_backend):
        host_pages, device_pages = self._get_indexer_page_indices(host_indices, device_indices)
        for layer, device in enumerate(self.packed_device_index_buffers):
            view = page_view(self, layer)
            view[host_pages.long()] = device[device_pages.long()].view(-1, view.shape[-1])

    unpinned(cls)
    cls.load_to_device_per_layer, cls.backup_from_device_all_layer = load, backup


def patch_mamba(module):
    cls = module.MambaPoolHost

    def one_layer(src, dst, src_indices, dst_indices, layer_id, num_layers, io_backend):
        if src_indices.numel():
            dst[dst_indices.long()] = src[:, layer_id, 0][src_indices.long()]

    def all_layers(src_layers, dst, src_indices, dst_indices, num_layers, *_, **__):
        for layer in range(num_layers):
            dst[dst_indices.long(), layer, 0] = src_layers[layer][src_indices.long()]

    unpinned(cls)
    cls._copy_tensor_pf_lf = staticmethod(one_layer)
    cls._copy_tensor_all_layers_lf_pf = staticmethod(all_layers)


def patch_torch_native(module):
    """Read sliding-window layers at the slots they were written to, and compute no attention of a cached prefix.

    The backend writes windows at translated slots and reads them at untranslated ones; and it fills the queries up with
    one for every cached token, whose results it throws away.
    Source: sglang 0.5.23 srt/layers/attention/torch_native_backend.py:311-319, 379-387; 120-174.
    """
    cls = module.TorchNativeAttnBackend
    cls._run_sdpa_forward_extend = _without_cached_queries(cls._run_sdpa_forward_extend)
    for name in ("forward_extend", "forward_decode"):
        setattr(cls, name, _with_window_slots(getattr(cls, name)))


def _without_cached_queries(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def extend(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        a = types.SimpleNamespace(**bound.arguments)
        if a.encoder_lens is not None or a.is_cross_attn or not a.causal or not a.extend_prefix_lens.any():
            return original(self, *args, **kwargs)
        start = 0
        for row, new, total in zip(a.req_pool_indices, a.extend_seq_lens.tolist(), a.seq_lens.tolist(), strict=True):
            slots = a.req_to_token[row, :total]
            end = start + new
            a.output[start:end] = _new_queries(self, a, a.query[start:end], a.k_cache[slots], a.v_cache[slots])
            start = end
        return a.output

    return extend


def _new_queries(backend, a, q, k, v):
    """Attention of the last ``len(q)`` tokens over all; [tokens, heads, size] each. In bfloat16 the bits stay the same."""
    from torch.nn.functional import scaled_dot_product_attention

    window = a.sliding_window_size if a.sliding_window_size is not None else -1
    mask = None
    if window > -1 or len(q) < len(k):
        mask = backend._make_sliding_window_mask(
            q_len=len(q),
            kv_len=len(k),
            sliding_window_size=window if window > -1 else len(k),
            device=q.device,
            query_offset=len(k) - len(q),
        )
    q, k, v = (t.to(a.query.dtype).movedim(0, 1).unsqueeze(0) for t in (q, k, v))
    made = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=a.enable_gqa, scale=a.scaling, is_causal=mask is None
    )
    return made.squeeze(0).movedim(1, 0)


def _with_window_slots(original):
    @functools.wraps(original)
    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        pool = self.token_to_kv_pool
        if not (self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]):
            return original(self, q, k, v, layer, forward_batch, save_kv_cache)
        untranslated = self.req_to_token_pool
        table = untranslated.req_to_token.clone()
        rows = forward_batch.req_pool_indices.long()
        slots = pool.translate_loc_from_full_to_swa(table[rows].long().flatten())
        table[rows] = slots.view(table[rows].shape).to(table.dtype).clamp(min=0)
        self.req_to_token_pool = types.SimpleNamespace(req_to_token=table)
        try:
            return original(self, q, k, v, layer, forward_batch, save_kv_cache)
        finally:
            self.req_to_token_pool = untranslated

    return forward


def patch_mla_dispatch(module):
    """Always take the absorbed MLA path: ``torch_native`` has no handler and the fallback picks MHA for a prefill."""
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


class DoneEvent:
    """A CUDA event of work that has been done: on the CPU a forward has ended when its call returns."""

    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


def patch_prefill(module):
    """The prefill scheduler records a CUDA event before it sends a cached prefix early."""
    real = module.torch

    class Torch:
        cuda = types.SimpleNamespace(Event=DoneEvent, current_stream=lambda device=None: None)

        def __getattr__(self, name):
            return getattr(real, name)

    module.torch = Torch()


def patch_nixl(module):
    """SGLang's NIXL backend calls its KV pool VRAM whatever the device; on the CPU it is DRAM."""
    import nixl._api as api

    original = api.nixl_agent.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    api.nixl_agent.__init__ = init


PATCHES = {
    "sglang.srt.disaggregation.prefill": patch_prefill,
    "sglang.srt.disaggregation.nixl.conn": patch_nixl,
    "sglang.srt.mem_cache.pool_host.mha": patch_mha,
    "sglang.srt.mem_cache.pool_host.mla": patch_mla,
    "sglang.srt.mem_cache.pool_host.dsa": patch_dsa,
    "sglang.srt.mem_cache.pool_host.mamba": patch_mamba,
    "sglang.srt.layers.attention.torch_native_backend": patch_torch_native,
    "sglang.srt.models.deepseek_common.attention_backend_handler": patch_mla_dispatch,
}
