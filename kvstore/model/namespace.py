"""A namespace: everything that must be equal for stored bytes to be interchangeable.

Its id is a digest of the canonical description, so the same model name with another revision, dtype or
interior is another namespace: a miss, never a silent mix. An engine's own page size is not in it; the stored
`page_tokens` is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b

from kvstore.errors import InvalidRequest, LimitExceeded
from kvstore.model.layout import Attention, Dtype, PageLayout, SideComponent

NAMESPACE_ID_BYTES = 16
_TEXT_LIMIT_BYTES = 512
_CANONICAL_LIMIT_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Namespace:
    """Model and weights revision, layout, KV group and tenant.

    `kv_group` names one of the model's KV groups (`full`, `sliding:4096`, `state`); each is a namespace of its
    own. `tenant` separates users; the tenant's secret goes into the keys, never in here.
    """

    model: str
    revision: str
    layout: PageLayout
    kv_group: str = "full"
    tenant: str = ""
    id: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "revision", "kv_group", "tenant"):
            text = getattr(self, name)
            if not isinstance(text, str) or (not text and name != "tenant"):
                raise InvalidRequest(f"a namespace needs a non-empty text as {name}, not {text!r}")
            try:
                size_bytes = len(text.encode())
            except UnicodeEncodeError as exc:
                raise InvalidRequest(f"{name} is not valid Unicode: {exc}") from exc
            if size_bytes > _TEXT_LIMIT_BYTES:
                raise LimitExceeded(f"{name} is longer than {_TEXT_LIMIT_BYTES} bytes")
        canonical = self.canonical
        if len(canonical) > _CANONICAL_LIMIT_BYTES:
            raise LimitExceeded(f"a namespace description has at most {_CANONICAL_LIMIT_BYTES} bytes")
        digest = blake2b(canonical, digest_size=NAMESPACE_ID_BYTES, person=b"kvstore-ns").digest()
        object.__setattr__(self, "id", digest)

    @property
    def canonical(self) -> bytes:
        """The description as sorted, compact JSON: what the id is a digest of."""
        layout = self.layout
        return json.dumps(
            {
                "model": self.model,
                "revision": self.revision,
                "kv_group": self.kv_group,
                "tenant": self.tenant,
                "layers": layout.layers,
                "kv_heads": layout.kv_heads,
                "head_dim": layout.head_dim,
                "dtype": layout.dtype.value,
                "page_tokens": layout.page_tokens,
                "pages_per_chunk": layout.pages_per_chunk,
                "attention": layout.attention.value,
                "interior": layout.interior,
                "side_components": [[c.name, c.bytes_per_page] for c in layout.side_components],
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_canonical(cls, text: bytes) -> Namespace:
        """The inverse of `canonical`; raises InvalidRequest on anything else."""
        if len(text) > _CANONICAL_LIMIT_BYTES:
            raise LimitExceeded(f"a namespace description has at most {_CANONICAL_LIMIT_BYTES} bytes")
        try:
            fields = json.loads(text)
            layout = PageLayout(
                layers=fields["layers"],
                kv_heads=fields["kv_heads"],
                head_dim=fields["head_dim"],
                dtype=Dtype(fields["dtype"]),
                page_tokens=fields["page_tokens"],
                pages_per_chunk=fields["pages_per_chunk"],
                attention=Attention(fields["attention"]),
                interior=fields["interior"],
                side_components=tuple(SideComponent(name, size) for name, size in fields["side_components"]),
            )
            namespace = cls(fields["model"], fields["revision"], layout, fields["kv_group"], fields["tenant"])
        except (KeyError, TypeError, ValueError, RecursionError) as exc:
            raise InvalidRequest(f"not a canonical namespace description: {exc}") from exc
        if namespace.canonical != text:
            raise InvalidRequest("not a canonical namespace description: fields differ after parsing")
        return namespace

    @property
    def title(self) -> str:
        """Short text for people: model, revision, group, first digits of the id."""
        return f"{self.model}@{self.revision[:12]} {self.kv_group} [{self.id.hex()[:8]}]"
