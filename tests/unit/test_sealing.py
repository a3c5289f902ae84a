from __future__ import annotations

import hashlib
import string
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.message_ids import digest, seal, sealed_id, unseal, unsealed_digest

MEMBER = b'{"card":"4111111199997777"}'


@given(st.binary(max_size=400), st.binary(max_size=40))
def test_what_was_sealed_can_be_read_again_in_its_context_only(text: bytes, context: bytes) -> None:
    sealed = seal("test", context, text)
    assert unseal("test", context, sealed) == text
    assert unseal("test", context + b"x", sealed) is None
    assert unseal("other", context, sealed) is None


def test_a_sealed_text_that_was_changed_anywhere_is_refused() -> None:
    raw = urlsafe_b64decode(seal("test", b"", b"abc") + "==")
    for index in range(len(raw)):
        changed = raw[:index] + bytes([raw[index] ^ 1]) + raw[index + 1 :]
        assert unseal("test", b"", urlsafe_b64encode(changed).decode()) is None
    for nonsense in ("", "a", "é", "====", "a" * 4_000):
        assert unseal("test", b"", nonsense) is None


@pytest.mark.parametrize("text", [b"", b"a", b"ab"])
def test_each_sealed_text_has_one_spelling(text: bytes) -> None:
    sealed = seal("test", b"", text)
    characters = string.ascii_letters + string.digits + "-_"
    for last in set(characters) - {sealed[-1]}:
        assert unseal("test", b"", sealed[:-1] + last) is None
    for other in (sealed + "=", sealed + "\n", f" {sealed}", f"{sealed[:3]}!{sealed[3:]}"):
        assert unseal("test", b"", other) is None
    assert unseal("test", b"", sealed) == text


def test_a_sealed_id_is_the_same_each_time_and_holds_nothing_that_could_be_guessed(settings: Any) -> None:
    one = sealed_id("payments", 3, MEMBER)
    assert one == sealed_id("payments", 3, MEMBER)
    slot, _, sealed = one.partition("~")
    assert slot == "3" and len(sealed) == 48
    for kind in ("sha1", "sha256", "md5"):
        plain = hashlib.new(kind, MEMBER)
        assert plain.hexdigest()[:8] not in one
        assert urlsafe_b64encode(plain.digest()).decode()[:8] not in one
    # Equal messages of two topics cannot be told to be equal, nor can those of two deployments.
    assert sealed_id("orders", 3, MEMBER) != one
    settings.SECRET_KEY = "another"
    assert sealed_id("payments", 3, MEMBER) != one


@pytest.mark.parametrize("fallback", ["old", b"old"])
def test_what_was_sealed_before_the_secret_key_was_changed_stays_good(settings: Any, fallback: Any) -> None:
    settings.SECRET_KEY = fallback
    sealed, named = seal("test", b"c", b"text"), sealed_id("payments", 3, MEMBER)
    settings.SECRET_KEY = "new"
    assert unseal("test", b"c", sealed) is None
    settings.SECRET_KEY_FALLBACKS = ["between", fallback]
    assert unseal("test", b"c", sealed) == b"text"
    assert unsealed_digest("payments", named.partition("~")[2]) == digest(MEMBER)
    assert seal("test", b"c", b"text") != sealed
