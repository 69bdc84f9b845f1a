"""What lies in the remote store: names that a tenant's secret makes, and objects of a header and a page.

The store underneath has no authentication, so a name is all that stands between two tenants: it is an HMAC
over namespace and key, and without the secret it can neither be computed nor traced back to tokens.
"""

from __future__ import annotations

import hmac
import struct

from sglang_hicache_ext.keys import NAMESPACE_BYTES
from sglang_hicache_ext.storage_backends.record import DIGEST_BYTES

_HEADER = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s{NAMESPACE_BYTES}s8x")
HEADER_BYTES = _HEADER.size
_MAGIC = b"HXremote"
WIRE_VERSION = 1
assert HEADER_BYTES == 64, "the payload starts on a cache line"


def encode_header(namespace: bytes, payload_bytes: int, digest: bytes) -> bytes:
    """HEADER_BYTES bytes that go ahead of the payload, in the same put."""
    return _HEADER.pack(_MAGIC, WIRE_VERSION, HEADER_BYTES, payload_bytes, digest, namespace)


def stored_digest(header: bytes | memoryview, namespace: bytes, payload_bytes: int) -> bytes | None:
    """The digest in ``header``, or None when it is no header of such a page."""
    magic, version, size, nbytes, digest, stored = _HEADER.unpack_from(header)
    expected = (_MAGIC, WIRE_VERSION, HEADER_BYTES, payload_bytes, namespace)
    return digest if (magic, version, size, nbytes, stored) == expected else None


class ObjectNames:
    """Names of pages in the store, for one tenant. Immutable, any thread."""

    def __init__(self, tenant: str, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"hicache-ext names\0" + tenant.encode(), "sha256")
        self._tenant = hmac.digest(b"", tenant.encode(), "sha256").hex()[:16]
        self.proof = hmac.digest(secret, b"hicache-ext tenant proof\0" + tenant.encode(), "sha256")
        """32 bytes that tell whether two clients hold the same secret, without telling the secret."""

    @property
    def proof_name(self) -> str:
        """Name of the object that holds ``proof``; the same for every secret of the tenant."""
        return f"hx1.tenant.{self._tenant}"

    def prefix(self, namespace: bytes) -> str:
        """What the names of all pages of ``namespace`` start with."""
        return "hx1." + hmac.digest(self._key, namespace, "sha256")[:8].hex() + "."

    def name(self, namespace: bytes, key: bytes) -> str:
        return self.names(namespace, [key])[0]

    def names(self, namespace: bytes, keys: list[bytes]) -> list[str]:
        """One name per key, 53 characters."""
        prefix, secret = self.prefix(namespace), self._key
        return [prefix + hmac.digest(secret, namespace + k, "sha256")[:16].hex() for k in keys]
