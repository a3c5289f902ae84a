"""Several workers and ZooKeeper: who owns which slots when workers come, go, die, hang, are cut off or find all gone.

Workers are coordinators in threads, with a client each. What they own is what their callbacks were told.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NotEmptyError

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.coordination import Holding, Worker, topic_slots
from django_rmq.core.coordination.zookeeper import Ensemble, ZooKeeperCoordinator, check, end_session, survey
from django_rmq.core.coordination.zookeeper import coordinator as coordinating
from django_rmq.core.coordination.zookeeper.client import ZooKeeperSession
from django_rmq.core.coordination.zookeeper.coordinator import LONGEST_BEAT
from django_rmq.core.coordination.zookeeper.znodes import unpack
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, ServerRefused, ServerUnavailable
from django_rmq.operations import Actor, Operations, stats
from django_rmq.operations.health import Finding, HealthThresholds
from tests.support import coordinators
from tests.support.coordinators import PATIENCE, SERIAL, SESSION, SHARED, SHORT, TAKE_OVER, Told
from tests.support.embedded_server import free_port
from tests.support.servers import TcpProxy, ZooKeeperEnsemble, ZooKeeperServer
from tests.support.workers import LONG, eventually


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for ZooKeeper than a deployment does: a busy machine can pause for some seconds."""
    for function in (ZooKeeperSession.open, check, end_session, survey):
        monkeypatch.setattr(function, "__defaults__", (LONG,))
    monkeypatch.setattr(ZooKeeperSession.ask, "__kwdefaults__", {"seconds": LONG})


class Member(coordinators.Member):
    """A worker that meets others in ZooKeeper; `proxy` is its own way there, if it has one."""

    party: Party
    proxy: TcpProxy | None = None

    def kill(self) -> None:
        """Be heard of no more: connections stay, no byte passes."""
        assert self.proxy is not None
        self.silent = True
        self.proxy.swallow()

    def expire(self) -> None:
        """Let the server end the session, as if it had not heard of this worker for long enough."""
        assert self.proxy is not None
        number_and_password = self.coordinator._session.client.client_id
        self.proxy.cut()
        with visitor(self.party.ensemble.hosts, client_id=number_and_password):
            pass
        self.proxy.mend()


class Party(coordinators.Party):
    """Workers below one path."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.proxies: list[TcpProxy] = []

    def make(
        self,
        topics: Iterable[Topic] = (SERIAL, SHARED),
        *,
        apart: bool = False,
        ensemble: Ensemble | None = None,
        session_seconds: float = SESSION,
        **options: Any,
    ) -> Member:
        ensemble = replace(ensemble or self.ensemble, session_seconds=session_seconds)
        proxy = None
        if apart:
            proxy = TcpProxy(int(ensemble.hosts.rpartition(":")[2])).__enter__()
            self.proxies.append(proxy)
            ensemble = replace(ensemble, hosts=f"127.0.0.1:{proxy.port}")
        options = {"registered": dict, "token": uuid.uuid4().hex, "audit_seconds": 0.5, **options}
        member = Member(self, partial(ZooKeeperCoordinator, ensemble), topics, **options)
        member.proxy = proxy
        return member

    def add(self, topics: Iterable[Topic] = (SERIAL, SHARED), **options: Any) -> Member:
        member = self.make(topics, **options)
        self.all.append(member)
        member.coordinator.start()
        return member

    def add_mortal(self, **options: Any) -> Member:
        return self.add(apart=True, session_seconds=SHORT, **options)

    def holdings(self) -> list[Holding]:
        return survey(self.ensemble).holdings

    def members(self) -> list[str]:
        return [one.worker.id for one in survey(self.ensemble).members]

    def coordinator(self, topic: Topic, own: Told, disown: Told) -> ZooKeeperCoordinator:
        worker = Worker(uuid.uuid4().hex, "host", 1, 0.0, 4, topic_slots([topic]))
        options: dict[str, Any] = {"registered": dict, "token": uuid.uuid4().hex}
        return ZooKeeperCoordinator(self.ensemble, worker, own, disown, **options)

    def end(self) -> None:
        try:
            super().end()
        finally:
            for proxy in self.proxies:
                proxy.__exit__()


@contextmanager
def visitor(hosts: str, **options: Any) -> Iterator[KazooClient]:
    """Somebody who is no worker."""
    client = KazooClient(hosts, timeout=SESSION, **options)
    client.start(LONG)
    try:
        yield client
    finally:
        client.stop()
        client.close()


@pytest.fixture
def ensemble(zookeeper: str) -> Iterator[Ensemble]:
    root = f"/t{uuid.uuid4().hex[:12]}"
    yield Ensemble(zookeeper, root, SESSION)
    with visitor(zookeeper, auth_data=[("digest", "rmq:secret")]) as client:
        client.delete(root, recursive=True)


@pytest.fixture
def party(ensemble: Ensemble) -> Iterator[Party]:
    with Party(ensemble) as party:
        yield party


@contextmanager
def server_of_its_own() -> Iterator[tuple[ZooKeeperServer, Party]]:
    with ZooKeeperServer() as server, Party(Ensemble(server.hosts, "/rmq")) as party:
        yield server, party


def forget_losses(party: Party) -> None:
    for member in party.all:
        member.lost.clear()


def losses(party: Party) -> list[Counter[str]]:
    return [member.lost for member in party.live()]


class TestSharing(coordinators.Sharing):
    """Workers that meet in ZooKeeper."""

    def check_sizes(self, party: Party) -> None:
        """No node is large."""
        with visitor(party.ensemble.hosts) as client:
            sizes = {node: client.exists(node).dataLength for node in every_node(client, party.ensemble.root)}
        assert max(sizes.values()) < 2_000, sizes


def test_who_meets_a_node_of_its_own_earlier_session_replaces_it(party: Party) -> None:
    [first] = party.share(1)
    token = first.coordinator._token
    first.silent = True
    second = party.add(identity=first.id, token=token)
    party.wait_for(lambda: not first.serial() and len(second.serial()) == 64, "the earlier one gives up")


def test_who_loses_its_session_gives_up_its_slots_and_joins_with_a_new_client(party: Party) -> None:
    near, far = party.add(), party.add(apart=True)
    party.wait_until_shared_out()
    forget_losses(party)
    client = far.coordinator._session.client
    far.expire()
    party.wait_for(lambda: far.lost["serial"] == 32, "it gives up what it had")
    party.wait_until_shared_out()
    assert far.coordinator.wait_settled(TAKE_OVER * PATIENCE)
    assert far.coordinator._session.client is not client
    assert near.lost["serial"] <= 32
    eventually(lambda: not client.connected and client._stopped.is_set(), "the old client's end")


def test_a_worker_whose_node_was_deleted_joins_again(party: Party) -> None:
    first, second = party.share(2)
    with visitor(party.ensemble.hosts) as client:
        before = client.exists(party.ensemble.path("workers", first.id)).czxid
        client.delete(party.ensemble.path("workers", first.id))
        path = party.ensemble.path("workers", first.id)
        eventually(lambda: (found := client.exists(path)) and found.czxid > before, "joining again")
    party.wait_until_shared_out()
    assert len(second.serial()) == 32


def test_a_parent_ends_the_session_of_its_dead_child(party: Party) -> None:
    first, second = party.add(), party.add(apart=True)
    party.wait_until_shared_out()
    end_session(party.ensemble, second.id, "another token")
    assert len(survey(party.ensemble).members) == 2
    second.kill()
    end_session(party.ensemble, second.id, second.coordinator._token)
    assert [one.worker.id for one in survey(party.ensemble).members] == [first.id]
    party.wait_until_shared_out(1.0 * PATIENCE)


def test_a_fork_leaves_the_session_of_its_parent_alone(party: Party) -> None:
    [first] = party.share(1)
    number = first.coordinator._session.number
    child = os.fork()
    if child == 0:
        code = 1
        try:
            first.coordinator.stop(1.0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with visitor(party.ensemble.hosts) as client:
        path = party.ensemble.path("workers", first.id)
        assert client.exists(path).ephemeralOwner == number
        # The copies of the socket in the child are gone, and the session goes on.
        party.add()
        party.wait_until_shared_out()
        assert client.exists(path).ephemeralOwner == number


def test_nobody_starts_without_zookeeper(party: Party) -> None:
    hosts = f"127.0.0.1:{free_port()}"
    member = party.make(ensemble=Ensemble(hosts))
    started = time.monotonic()
    with pytest.raises(ServerUnavailable, match=rf"{hosts} does not answer \(.*refused"):
        member.coordinator.start()
    assert time.monotonic() - started < 5 * PATIENCE
    member.coordinator.stop()


def test_a_path_that_holds_something_else_is_refused(party: Party) -> None:
    ensemble = party.ensemble
    with visitor(ensemble.hosts) as client:
        client.create(ensemble.root, b"the locks of another program")
        with pytest.raises(ConfigurationError, match=r"the ZooKeeper path /t.*locks of another program"):
            party.make().coordinator.start()
        with pytest.raises(ConfigurationError, match="holds other data"):
            check(ensemble)
        client.delete(ensemble.root)
        client.create(ensemble.root, None)
        client.create(ensemble.path("brokers"))
        with pytest.raises(ConfigurationError, match="children \\['brokers'\\]"):
            party.make().coordinator.start()
        client.delete(ensemble.path("brokers"))
    check(ensemble)
    party.add()
    party.wait_until_shared_out()
    check(ensemble)


def test_workers_of_another_prefix_do_not_share_a_path(party: Party) -> None:
    party.add()
    other = replace(party.ensemble, key_prefix="other:")
    with pytest.raises(ConfigurationError, match="KEY_PREFIX '', this process has 'other:'"):
        party.make(ensemble=other).coordinator.start()


def test_a_check_writes_nothing(ensemble: Ensemble) -> None:
    check(ensemble)
    with visitor(ensemble.hosts) as client:
        assert client.exists(ensemble.root) is None


def closed(ensemble: Ensemble, *auth: tuple[str, str]) -> Ensemble:
    return replace(ensemble, auth=auth or (("digest", "rmq:secret"),), is_closed=True)


def test_with_a_login_every_node_is_for_its_workers_only(ensemble: Ensemble) -> None:
    with Party(closed(ensemble)) as party:
        first = party.add()
        party.add()
        party.wait_until_shared_out()
        assert first.coordinator.wait_settled(TAKE_OVER * PATIENCE)
        with visitor(ensemble.hosts, auth_data=[("digest", "rmq:secret")]) as client:
            nodes = list(every_node(client, ensemble.root))
            assert len(nodes) == 1 + 3 + 2 + 2
            for node in nodes:
                (acl,) = client.get_acls(node)[0]
                assert (acl.id.scheme, acl.id.id.partition(":")[0], acl.perms) == ("digest", "rmq", 31), node
        with visitor(ensemble.hosts) as stranger:
            with pytest.raises(NoAuthError):
                stranger.delete(ensemble.path("workers", first.id))
            with pytest.raises(NoAuthError):
                stranger.set(ensemble.path("assignment"), b"")
        for others in (ensemble, closed(ensemble, ("digest", "rmq:wrong"))):
            started = time.monotonic()
            with pytest.raises(ServerRefused, match="belongs to other credentials"):
                party.make(ensemble=others).coordinator.start()
            with pytest.raises(ServerRefused, match="belongs to other credentials"):
                check(others)
            assert time.monotonic() - started < 2 * PATIENCE
        assert len(survey(party.ensemble).members) == 2


def test_credentials_do_not_reach_the_log(ensemble: Ensemble, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    with Party(closed(ensemble, ("digest", "rmq:secret"))) as party:
        party.add()
        party.wait_until_shared_out()
        with pytest.raises(ServerRefused):
            check(closed(ensemble, ("digest", "rmq:canary")))
    assert "Sending request" in caplog.text, "kazoo was heard"
    assert not {"secret", "canary"} & set(re.findall("secret|canary", caplog.text))


def every_node(client: KazooClient, root: str) -> Iterator[str]:
    yield root
    for name in client.get_children(root):
        yield from every_node(client, f"{root}/{name}")


def test_a_login_of_a_kind_that_the_server_does_not_know_is_refused(ensemble: Ensemble) -> None:
    with pytest.raises(ServerRefused, match="refuses the credentials \\(schemes: palmistry\\)"):
        check(closed(ensemble, ("palmistry", "a:b")))


def test_logins_may_be_introduced_one_worker_after_the_other(
    party: Party, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has none yet cannot read of those who have: it shares out without them as long as it is the first."""
    old = party.add(identity="0" * 32)
    party.wait_until_shared_out()
    assert "is open to everyone" not in caplog.text
    new = party.add(ensemble=closed(party.ensemble))
    assert "is open to everyone" in caplog.text
    assert old.coordinator.wait_settled(TAKE_OVER * PATIENCE)
    assert len(old.serial()) == 64
    party.add(ensemble=closed(party.ensemble))
    old.leave()
    party.wait_until_shared_out()
    assert len(new.serial()) == 32


@pytest.mark.slow
def test_by_default_workers_go_on_with_what_they_own_while_zookeeper_is_away() -> None:
    with server_of_its_own() as (server, party):
        workers = party.share(3)
        party.wait_until_settled(workers)
        forget_losses(party)
        give_up_clients_after(SHORT, workers)
        server.kill()
        eventually(lambda: not any(member.coordinator._session for member in workers), "a session's time")
        assert not any(member.coordinator.wait_settled(0) for member in workers)
        assert party.is_shared_out()
        assert losses(party) == [Counter()] * 3
        with pytest.raises(ServerUnavailable):
            workers[0].coordinator.members()
        server.start()
        party.wait_until_settled(workers)
        assert losses(party) == [Counter()] * 3, "sessions outlive a restart"
        party.add()
        party.wait_until_shared_out()


def give_up_clients_after(seconds: float, workers: Iterable[Member]) -> None:
    """Let workers take their sessions for over after so long without ZooKeeper, which keeps them for longer."""
    for member in workers:
        member.coordinator.session_seconds = seconds


@pytest.mark.slow
def test_strict_workers_stop_when_the_connection_is_lost_and_come_back() -> None:
    with server_of_its_own() as (server, party):
        workers = [party.add(is_strict=True) for _ in range(2)]
        party.wait_until_shared_out()
        server.kill()
        seconds = party.wait_for(lambda: not any(member.serial() for member in workers), "all give up")
        print(f"given up after {seconds:.2f} s")
        assert [("shared", 0) in member.slots for member in workers] == [True] * 2, "what has no gate stays"
        server.start()
        party.wait_until_shared_out()
        # Who has which half depends on whether their sessions outlasted the server's absence.
        assert [len(member.serial()) for member in workers] == [32, 32]


@pytest.mark.slow
@pytest.mark.parametrize("is_strict", [False, True])
def test_in_a_black_hole_suspended_comes_and_lost_never_does(party: Party, is_strict: bool) -> None:
    near = party.add()
    far = party.add(apart=True, session_seconds=SHORT, is_strict=is_strict)
    party.wait_until_shared_out()
    forget_losses(party)
    assert far.proxy is not None
    session = far.coordinator._session
    # It comes back with a session that lasts.
    far.coordinator.ensemble = replace(far.coordinator.ensemble, session_seconds=SESSION)
    far.coordinator.session_seconds = SESSION
    far.proxy.swallow()
    seconds = party.wait_for(lambda: len(near.serial()) == 64, "the near one takes over")
    print(f"taken over after {seconds:.2f} s")
    eventually(lambda: not session.is_connected, "SUSPENDED")
    assert not session.is_lost
    assert not far.coordinator.wait_settled(0)
    if is_strict:
        party.wait_for(lambda: not far.serial(), "the far one gives up")
    else:
        assert len(far.serial()) == 32, "the gate keeps that safe"
    far.proxy.let_through()
    far.proxy.disconnect()
    party.wait_until_shared_out()
    assert far.lost["serial"] == 32
    assert near.lost["serial"] == 32
    assert far.coordinator._session is not session


@pytest.mark.slow
def test_a_strict_worker_gives_up_by_its_own_clock_if_nobody_tells_it_anything(party: Party) -> None:
    far = party.add(apart=True, session_seconds=SHORT, is_strict=True)
    party.wait_until_shared_out()
    # What kazoo would tell is not heard, and the thread that looks is stuck.
    far.coordinator._session.client.remove_listener(far.coordinator._session._listen)
    stuck = threading.Event()
    far.coordinator._turn = lambda: stuck.wait(60) and 0.0
    assert far.proxy is not None
    far.proxy.swallow()
    party.wait_for(lambda: not far.serial(), "giving up")
    stuck.set()
    far.silent = True


def test_a_cut_shorter_than_a_session_moves_nothing(party: Party) -> None:
    near, far = party.add(identity="1" * 32), party.add(identity="0" * 32, apart=True)
    party.wait_until_shared_out()
    forget_losses(party)
    assert far.proxy is not None
    session = far.coordinator._session
    far.proxy.cut()
    eventually(lambda: not session.is_connected, "SUSPENDED")
    far.proxy.mend()
    eventually(lambda: session.is_connected, "being back")
    assert far.coordinator.wait_settled(TAKE_OVER * PATIENCE)
    assert losses(party) == [Counter()] * 2
    assert far.coordinator._session is session
    # Watches are set again: it hears of changes at once, not when it next looks.
    eventually(lambda: any(session.client._child_watchers.values()), "watching again")
    [third] = party.share(1)
    assert near.lost + far.lost == Counter({"serial": len(third.serial())})


def test_stop_is_bounded_whatever_zookeeper_does(party: Party) -> None:
    far = party.add(apart=True)
    party.wait_until_shared_out()
    far.kill()
    started = time.monotonic()
    far.coordinator.stop(0.5)
    assert time.monotonic() - started < 30
    party.wait_for(lambda: not far.slots, "disowning all")


@pytest.mark.slow
def test_after_the_data_was_wiped_everybody_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of_its_own() as (server, party):
        workers = party.share(3)
        had = [member.serial() for member in workers]
        with visitor(server.hosts) as client:
            for _ in range(200):
                client.set("/rmq/workers", b"")
        party.wait_until_settled(workers)
        give_up_clients_after(SHORT, workers)
        monkeypatch.setattr(coordinating, "REJOIN_SECONDS", LONG)
        server.kill()
        server.wipe()
        server.start()
        # It knows less than its clients have seen, and lets none of them in: they have to be made again.
        eventually(lambda: len(survey(party.ensemble).members) == 3, "three workers")
        monkeypatch.setattr(coordinating, "REJOIN_SECONDS", 0.0)
        party.wait_until_settled(workers)
        party.wait_until_shared_out()
        assert [member.serial() for member in workers] == had, "the plan is remembered by who makes it"


def test_after_all_nodes_were_deleted_everybody_is_back_with_what_it_had(party: Party) -> None:
    workers = party.share(3)
    had = [member.serial() for member in workers]
    party.settle_for(LONG)
    with visitor(party.ensemble.hosts) as client:
        before = client.exists(party.ensemble.root).czxid
        # Whoever joins again while this goes on is deleted too.
        for _ in range(50):
            with suppress(NotEmptyError):
                client.delete(party.ensemble.root, recursive=True)
                break

        def is_back() -> bool:
            found = client.exists(party.ensemble.root)
            return found is not None and found.czxid > before

        eventually(is_back, "the path", 10 * PATIENCE)
    eventually(lambda: len(survey(party.ensemble).members) == 3, "three workers", 10 * PATIENCE)
    party.settle_for(0.2)
    party.wait_until_settled(workers, 10 * PATIENCE)
    party.wait_until_shared_out()
    assert [member.serial() for member in workers] == had


@pytest.mark.slow
@pytest.mark.usefixtures("java")
def test_the_leader_of_the_ensemble_dies_and_no_slot_moves() -> None:
    with ZooKeeperEnsemble() as three, Party(Ensemble(three.hosts, "/rmq")) as party:
        workers = party.share(3)
        party.wait_until_settled(workers)
        forget_losses(party)
        assert sorted(server.mode() for server in three.servers) == ["follower", "follower", "leader"]
        first = three.leader()
        first.kill()
        assert three.leader() is not first
        party.wait_until_settled(workers)
        assert losses(party) == [Counter()] * 3
        party.add()
        party.wait_until_shared_out()

        # The quorum is lost, and comes back.
        forget_losses(party)
        second = three.leader()
        sessions = [member.coordinator._session for member in party.live()]
        second.kill()
        eventually(lambda: not any(session.is_connected for session in sessions), "losing it")
        assert losses(party) == [Counter()] * 4
        first.launch()
        second.launch()
        for server in three.servers:
            server.wait_until_serving()
        party.wait_until_settled()
        party.wait_until_shared_out()


def spoiled_plans() -> Mapping[str, Callable[[Party], bytes]]:
    def owner(worker: str, slots: int = 64) -> bytes:
        plan = {"workers": [worker], "times": [1], "topics": {"serial": [slots, 0, 0]}}
        return b"x\n" + zlib.compress(json.dumps(plan).encode())

    return {
        "nothing": lambda party: b"",
        "junk": lambda party: b"junk",
        "cut off": lambda party: owner(party.all[0].id)[:-9],
        "no plan": lambda party: b"x\n" + zlib.compress(b"{}"),
        "owned by the dead": lambda party: owner("f" * 32),
        "owned by one": lambda party: owner(party.all[0].id),
        "owned beyond the end": lambda party: owner(party.all[1].id, 128),
        "huge": lambda party: b"x\n" + zlib.compress(bytes(1 << 27)),
    }


@pytest.mark.parametrize("how", spoiled_plans())
def test_an_assignment_that_was_spoiled_is_healed(party: Party, how: str) -> None:
    first, second = party.share(2)
    path = party.ensemble.path("assignment")
    with visitor(party.ensemble.hosts) as client:
        spoiled = client.set(path, spoiled_plans()[how](party)).version

        def is_healed() -> bool:
            data, stat = client.get(path)
            if stat.version == spoiled:
                return False
            owners = {span.worker for span in unpack(data)[1].topics["serial"]}
            return owners == {first.id, second.id}

        eventually(is_healed, "healing", 10 * PATIENCE)
    party.wait_until_settled([first, second], 10 * PATIENCE)
    party.wait_until_shared_out()


def test_an_assignment_spoiled_with_the_right_membership_is_found_by_the_audit(party: Party) -> None:
    first, second = party.share(2)
    party.wait_until_settled([first, second])
    path = party.ensemble.path("assignment")
    with visitor(party.ensemble.hosts) as client:
        basis = client.get(path)[0].partition(b"\n")[0]
        plan = {"workers": [first.id], "times": [1], "topics": {"serial": [60, 0, 0]}}
        spoiled = client.set(path, basis + b"\n" + zlib.compress(json.dumps(plan).encode())).version
        eventually(lambda: client.get(path)[1].version > spoiled, "healing", 10 * PATIENCE)
    party.wait_until_settled([first, second], 10 * PATIENCE)
    party.wait_until_shared_out()


@pytest.mark.slow
def test_strange_workers_get_no_slots(party: Party) -> None:
    first = party.add(identity="1" * 32)
    party.wait_until_shared_out()
    with visitor(party.ensemble.hosts) as client:
        client.create(party.ensemble.path("workers", "zz"), b"what?")
        client.create(party.ensemble.path("workers", "00"), None)
    # It has to assign instead of the stranger that comes before it.
    first.coordinator.session_seconds = SHORT
    party.add(identity="2" * 32)
    party.wait_until_shared_out()
    assert len(survey(party.ensemble).members) == 2
    assert len(first.serial()) == 32


def test_definitions_are_published_and_decide_how_many_slots_there_are(party: Party) -> None:
    registered: dict[str, dict[str, Any]] = {"gone": {"slots": 2}}
    trouble: list[Exception] = []

    def definitions() -> dict[str, dict[str, Any]]:
        if trouble:
            raise trouble[0]
        return dict(registered)

    first, second = party.add(registered=definitions), party.add(registered=definitions)
    party.wait_until_shared_out()
    wider = {"slots": 128, "serial": True, "type": "priority"}
    registered["serial"] = wider
    del registered["gone"]
    party.wait_for(lambda: party.is_shared_out(128), "all of the new slots", 5.0 * PATIENCE)
    assert len(first.serial()) == len(second.serial()) == 64
    folder = party.ensemble.path("topics")
    with visitor(party.ensemble.hosts) as client:
        eventually(lambda: set(client.get_children(folder)) == {"serial", "shared"}, "publishing")
        assert json.loads(client.get(f"{folder}/serial")[0]) == wider
        assert json.loads(client.get(f"{folder}/shared")[0]) == {"serial": False, "slots": 4}

    # Nobody can tell now: what was published counts, for a new first worker too.
    trouble.append(ServerUnavailable("Redis is away"))
    party.add(identity="0" * 32, registered=definitions)
    party.wait_for(lambda: party.is_shared_out(128), "all of the published slots")


def packets(server: ZooKeeperServer) -> int:
    with socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as connection:
        connection.sendall(b"mntr")
        said = b"".join(iter(partial(connection.recv, 65536), b"")).decode()
    return int(next(line.split()[1] for line in said.splitlines() if line.startswith("zk_packets_received")))


@pytest.mark.slow
def test_workers_ask_little_and_a_change_wakes_few() -> None:
    count = 12
    with server_of_its_own() as (server, party):
        members = [party.add(audit_seconds=5.0) for _ in range(count)]
        party.wait_until_shared_out()
        party.wait_until_settled(members)
        before, began = packets(server), time.monotonic()
        threading.Event().wait(4.0)
        idle, seconds = packets(server) - before, time.monotonic() - began
        # Three stats with each beat, and kazoo's own pings.
        print(f"{idle / count / seconds:.1f} requests per second and worker while nothing happens")
        assert idle <= count * (seconds / LONGEST_BEAT + 1) * 5

        before = packets(server)
        party.add(audit_seconds=5.0)
        party.wait_until_shared_out()
        party.wait_until_settled()
        woken = packets(server) - before
        print(f"{woken} requests of {count + 1} workers for a join")
        # All read the assignment and who is there; only one reads every record.
        assert woken <= (count + 1) * 25


def test_an_assignment_too_large_for_a_node_forgets_and_is_written_all_the_same(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first] = party.share(1)
    assert first.coordinator.wait_settled(TAKE_OVER * PATIENCE)
    crumbs = {
        "workers": sorted([first.id, "f" * 32]),
        "times": list(range(64)),
        "topics": {"serial": [number for slot in range(64) for number in (1, slot % 2, slot)]},
    }
    path = party.ensemble.path("assignment")
    with visitor(party.ensemble.hosts) as client:
        size = len(client.get(path)[0])
        monkeypatch.setattr("django_rmq.core.coordination.zookeeper.coordinator.MAX_NODE", size + 70)
        client.set(path, b"x\n" + zlib.compress(json.dumps(crumbs).encode()))
        [second] = party.share(1)
        party.wait_until_settled([first, second])
        data = client.get(path)[0]
        assert len(data) <= size + 70
        assert len(unpack(data)[1].topics["serial"]) == 2, "two whole runs"


def findings() -> dict[str, Finding]:
    found = Operations(Actor("tester", "test")).health(HealthThresholds()).findings
    return {finding.name: finding for finding in found}


@pytest.mark.slow
def test_figures_and_health_tell_of_workers_in_zookeeper(party: Party, redis_url: str, prefix: str) -> None:
    topic = {"TYPE": "priority", "SLOTS": 64}
    zookeeper = {"HOSTS": party.ensemble.hosts, "ROOT": party.ensemble.root}
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": {"serial": topic}, "ZOOKEEPER": zookeeper}
    party.ensemble = replace(party.ensemble, key_prefix=prefix)
    first, second = party.share(2)
    with override_settings(RMQ=rmq):
        broker = connections.get_broker()
        declared = get_config().topic("serial")
        found = stats.read_workers(broker)
        assert {one.member.worker.id: one.slots["serial"] for one in found} == {first.id: 32, second.id: 32}
        assert {one.shared for one in found} == {("shared",)}
        assert stats.survey_topics(broker, [declared]).topics[0].consumers == 2
        owners = {row.worker for row in stats.read_slots(broker, declared, range(64)).rows}
        assert owners == {first.id, second.id}
        told = findings()
        assert (told["coordinator"].is_well, told["workers"].is_well) == (True, True)
    with override_settings(RMQ={**rmq, "ZOOKEEPER": {"HOSTS": f"127.0.0.1:{free_port()}"}}):
        broker = connections.get_broker()
        with pytest.raises(ServerUnavailable):
            stats.read_workers(broker)
        assert stats.survey_topics(broker, [declared]).topics[0].consumers == 0
        assert "does not answer" in findings()["coordinator"].text


def test_nobody_hears_kazoo_in_the_log_but_us(party: Party, caplog: pytest.LogCaptureFixture) -> None:
    far = party.add(apart=True)
    party.wait_until_shared_out()
    assert far.proxy is not None
    far.proxy.cut()
    eventually(lambda: "ZooKeeper is unavailable" in caplog.text, "the complaint")
    threading.Event().wait(1.5)
    far.proxy.mend()
    loud = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    # A worker of an earlier test may end only now, and say so too.
    ours = [record for record in loud if f":{far.proxy.port}" in record.getMessage()]
    assert len([record for record in ours if "ZooKeeper is unavailable" in record.getMessage()]) == 1
    assert all(record.name == "django_rmq.coordination" for record in loud)


# kazoo leaves a socket to the garbage collector when a handshake fails.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("java")
def test_tls_with_certificates_that_are_looked_at(certificates: Path) -> None:
    port = free_port()
    options = {
        "secureClientPort": str(port),
        "secureClientPortAddress": "127.0.0.1",
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": str(certificates / "server.both.pem"),
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": str(certificates / "ca.pem"),
        "ssl.trustStore.type": "PEM",
        "authProvider.x509": "org.apache.zookeeper.server.auth.X509AuthenticationProvider",
        "ssl.hostnameVerification": "false",
        "ssl.clientHostnameVerification": "false",
    }
    tls = {
        "CA": str(certificates / "ca.pem"),
        "CERT": str(certificates / "client.pem"),
        "KEY": str(certificates / "client.key"),
    }
    with ZooKeeperServer(options=options):
        hosts = f"127.0.0.1:{port}"
        with Party(Ensemble(hosts, "/rmq", is_closed=True, tls=tls)) as party:
            party.add()
            party.add()
            party.wait_until_shared_out()
            for wrong in ({**tls, "CA": None}, {"CA": tls["CA"]}):
                with pytest.raises(ServerUnavailable, match="does not answer"):
                    check(Ensemble(hosts, "/rmq", 2.0, tls=wrong), 0.8)
            with pytest.raises(ServerUnavailable, match="does not answer"):
                check(Ensemble(hosts, "/rmq", 2.0), 0.8)
            check(Ensemble(hosts, "/rmq", 2.0, tls={**tls, "CA": None, "VERIFY": False}))
