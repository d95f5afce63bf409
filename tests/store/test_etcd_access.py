"""Logins that expire, users who may not, and encrypted connections, all with a real etcd."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from bamboo_ds.errors import ConfigError, StoreError, StoreUnavailableError
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore, Login, Tls
from bamboo_ds.store.etcd_protobuf import etcd_messages
from tests.store.servers import collect

Connect = Callable[..., EtcdStore]

BAMBOO = Login("bamboo", "secret")
PREFIX = "/bamboo/test/"
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def demand_login(server: EmbeddedEtcd) -> None:
    """Let `BAMBOO` use its prefix and nothing else, and nobody else use anything."""
    messages = etcd_messages()
    with grpc.insecure_channel(server.endpoint) as channel:
        auth = messages.AuthStub(channel)
        for user, role in (("root", "root"), (BAMBOO.user, "job")):
            auth.UserAdd(messages.AuthUserAddRequest(name=user, password="secret"), timeout=10)
            auth.RoleAdd(messages.AuthRoleAddRequest(name=role), timeout=10)
            auth.UserGrantRole(messages.AuthUserGrantRoleRequest(user=user, role=role), timeout=10)
        request = messages.AuthRoleGrantPermissionRequest(name="job")
        request.perm.permType = 2  # READWRITE
        request.perm.key, request.perm.range_end = PREFIX.encode(), PREFIX[:-1].encode() + b"0"
        auth.RoleGrantPermission(request, timeout=10)
        auth.AuthEnable(messages.AuthEnableRequest(), timeout=10)


@pytest.fixture(scope="module", params=["simple", "jwt"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """A server whose tokens live for a second or two."""
    arguments = ["--bcrypt-cost", "4", "--auth-token-ttl", "1"]
    if request.param == "jwt":
        folder = tmp_path_factory.mktemp("jwt")
        openssl("genrsa", "-out", f"{folder}/key.pem", "2048")
        openssl("rsa", "-in", f"{folder}/key.pem", "-pubout", "-out", f"{folder}/pub.pem")
        token = f"jwt,pub-key={folder}/pub.pem,priv-key={folder}/key.pem,sign-method=RS256,ttl=2s"
        arguments = ["--bcrypt-cost", "4", "--auth-token", token]
    with EmbeddedEtcd(arguments=arguments) as server:
        demand_login(server)
        yield server


def test_after_the_token_expired_everything_goes_on(guarded: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(guarded, prefix=PREFIX, login=BAMBOO)
    first = store.put("plan", b"1")
    old = store.watch(from_revision=first)
    collect(old, 1)
    lease = store.lease(2)
    token = store._connection.token()
    assert token
    time.sleep(3.5)
    with store.watch(from_revision=first) as new:  # the first to meet the stale token
        assert [event.value for event in collect(new, 1)] == [b"1"]
    second = store.put("plan", b"2", lease=lease)
    assert second == first + 1
    assert [event.revision for event in collect(old, 1)] == [second]
    assert lease.alive
    assert store._connection.token() != token


def test_a_login_that_is_refused_for_a_while_does_not_end_a_lease(guarded: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(guarded, prefix=PREFIX, login=BAMBOO)
    lease = store.lease(2)
    store._connection._login, store._connection._token = Login("bamboo", "wrong"), ""
    time.sleep(1.3)
    assert 0 < lease.remaining_seconds < 0.8
    store._connection._login = BAMBOO
    time.sleep(1)
    assert lease.alive
    store.put("nodes/a", b"", lease=lease)


def test_a_write_with_a_stale_token_is_done_once(guarded: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(guarded, prefix=PREFIX, login=BAMBOO)
    store._connection._token = "stale.1"
    first = store.put("n", b"")
    store._connection._token = "stale.2"
    assert store.compare_and_set("n", b"1", expected=first) == first + 1
    store._connection._token = "stale.3"
    assert store.add("n", 1) == 2


def test_a_watch_that_breaks_after_the_token_expired_logs_in_again(guarded: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(guarded, prefix=PREFIX, login=BAMBOO)
    revision = store.put("plan", b"1")
    watch = store.watch(from_revision=revision)
    collect(watch, 1)
    for round_ in range(2):
        store._connection._token = f"stale.{round_}"
        watch._stream.call.cancel()  # type: ignore[attr-defined]
        time.sleep(0.2)
        store.put("plan", b"again")
        assert [event.value for event in collect(watch, 1)] == [b"again"]


def test_who_has_no_or_a_wrong_login_is_told_so(guarded: EmbeddedEtcd, connect: Connect) -> None:
    with pytest.raises(StoreError, match="give user and password") as caught:
        connect(guarded, prefix=PREFIX).put("x", b"")
    assert not isinstance(caught.value, StoreUnavailableError)
    with pytest.raises(StoreError, match=r"log in as 'bamboo': .*user or password is wrong") as caught:
        connect(guarded, prefix=PREFIX, login=Login("bamboo", "guess")).get("x")
    assert "guess" not in str(caught.value)
    assert "guess" not in repr(Login("bamboo", "guess"))


def test_who_may_not_use_a_prefix_is_told_so(guarded: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(guarded, prefix="/elsewhere/", login=BAMBOO)
    with pytest.raises(StoreError, match=r"permission denied.*grant the user's role") as caught:
        store.put("x", b"")
    assert not isinstance(caught.value, StoreUnavailableError)
    with store.watch(from_revision=1) as watch, pytest.raises(StoreError, match="grant the user's role") as caught:
        collect(watch, 1)
    assert not isinstance(caught.value, StoreUnavailableError)


def test_a_login_does_no_harm_where_none_is_asked_for(etcd: EmbeddedEtcd, connect: Connect, prefix: str) -> None:
    store = connect(etcd, prefix=prefix, login=BAMBOO)
    revision = store.put("plan", b"1")
    assert len(collect(store.watch(from_revision=revision), 1)) == 1


def test_an_encrypted_connection_wants_the_right_certificates(tmp_path: Path, connect: Connect) -> None:
    ca = certificate_authority(tmp_path)
    server, client = sign(tmp_path, "server"), sign(tmp_path, "client")
    arguments = ["--cert-file", server[0], "--key-file", server[1], "--client-cert-auth", "--trusted-ca-file", ca]
    etcd = EmbeddedEtcd()
    url = f"https://{etcd.endpoint}"
    etcd._arguments = [*arguments, "--listen-client-urls", url, "--advertise-client-urls", url]
    try:
        etcd.launch()
        store = connect([url], tls=Tls(ca, *client))
        revision = store.put("plan", b"1", timeout_seconds=20)
        assert len(collect(store.watch(from_revision=revision), 1)) == 1
        for tls in (Tls(ca), Tls(), Tls(client[0], *client)):
            with pytest.raises(StoreUnavailableError):
                connect([url], tls=tls).get("plan", timeout_seconds=0.6)
    finally:
        etcd.stop()


def test_tls_files_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cert_file and key_file go together"):
        EtcdStore(["a:1"], prefix=PREFIX, tls=Tls(cert_file="x"))
    with pytest.raises(ConfigError, match=r'TLS file ".*missing.pem": No such file'):
        EtcdStore(["a:1"], prefix=PREFIX, tls=Tls(tmp_path / "missing.pem"))


def certificate_authority(folder: Path) -> str:
    subject = ["-subj", "/CN=bamboo test authority", "-days", "2", "-nodes", *NEW_KEY]
    openssl("req", "-x509", *subject, "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.pem")
    return f"{folder}/ca.pem"


def sign(folder: Path, name: str) -> tuple[str, str]:
    """Return certificate and key for 127.0.0.1."""
    key, request, pem = (f"{folder}/{name}.{ending}" for ending in ("key", "csr", "pem"))
    openssl("req", "-subj", f"/CN={name}", "-nodes", *NEW_KEY, "-keyout", key, "-out", request)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    authority = ["-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key", "-CAcreateserial"]
    openssl("x509", "-req", "-in", request, *authority, "-days", "2", "-extfile", f"{folder}/san", "-out", pem)
    return pem, key
