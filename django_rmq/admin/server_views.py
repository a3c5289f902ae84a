"""The servers of Redis: what each reports about itself, and the commands that took it longest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from django_rmq.admin.body_display import visible
from django_rmq.admin.page import Pages, page
from django_rmq.core.model.server_checks import ServerInfo, size_text
from django_rmq.exceptions import ServerRefused
from django_rmq.operations import Operations, Permission
from django_rmq.templatetags.rmq_format import duration, number

Fact = tuple[str, str]


@page(Permission.VIEW)
def servers_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Show each server of Redis: a single one, that to which the sentinels lead, or each primary of a cluster."""
    servers = operations.servers()
    slow, slow_note = _slow_commands(operations)
    context = {
        "heading": _("Servers"),
        "address": str(operations.config.redis or ""),
        "may_ask": servers is not None,
        "servers": [
            {
                "name": visible(server.node) or _("Redis"),
                "facts": [(label, visible(text) or "–") for label, text in _facts(server)],
                "refusals": server.refusals,
                "warnings": [*server.losses, *server.warnings],
            }
            for server in servers or []
        ],
        "slow": slow,
        "slow_note": slow_note,
        "now_ms": operations.broker.now_ms(),
    }
    return pages.render(request, "topic/servers.html", context)


def _slow_commands(operations: Operations) -> tuple[list[dict[str, object]], str]:
    """Return the slowest commands that the servers remember, and a sentence if there is none to show."""
    try:
        commands = operations.slow_commands()
    except ServerRefused:
        return [], _("The user of Redis may not read the slow log.")
    lines = [
        {
            "node": visible(one.node),
            "command": visible(one.command),
            "milliseconds": one.microseconds / 1000,
            "at_ms": one.at_ms,
        }
        for one in commands
    ]
    return lines, "" if lines else _("The slow log is empty.")


def _facts(server: ServerInfo) -> Iterator[Fact]:
    """Yield what a server reports, as labels and texts."""

    def value(name: str) -> str:
        return server.info.get(name, "")

    def count(name: str) -> int:
        text = value(name)
        return int(text) if text.isdecimal() else 0

    is_valkey = "valkey_version" in server.info
    yield (
        _("Version"),
        f"Valkey {value('valkey_version')}" if is_valkey else f"Redis {value('redis_version')}",
    )
    yield _("Up for"), duration(count("uptime_in_seconds"))
    yield (
        _("Role"),
        _("replica of %(host)s:%(port)s") % {"host": value("master_host"), "port": value("master_port")}
        if value("role") == "slave"
        else _("primary"),
    )
    yield _("Memory"), _memory(server)
    yield _("When memory is full"), server.policy
    yield _("Snapshots"), _snapshots(server, count)
    yield _("Append-only file"), _append_only(server)
    yield _("Replicas"), _replicas(server, count)
    clients = number(count("connected_clients"))
    if limit := count("maxclients"):
        clients = _("%(count)s of at most %(limit)s") % {"count": clients, "limit": number(limit)}
    yield _("Clients"), clients
    yield _("Commands per second"), number(count("instantaneous_ops_per_sec"))
    yield _("Refused connections"), number(count("rejected_connections"))
    yield _("Keys deleted for want of memory"), number(count("evicted_keys"))


def _memory(server: ServerInfo) -> str:
    used, limit = server.memory_used, server.memory_limit
    if used is None:
        return ""
    if limit is None:
        return _("%(used)s are used, and there is no limit") % {"used": size_text(used)}
    return _("%(used)s of %(limit)s are used (%(share)s)") % {
        "used": size_text(used),
        "limit": size_text(limit),
        "share": f"{server.memory_share:.0%}",
    }


def _snapshots(server: ServerInfo, count: Callable[[str], int]) -> str:
    changes = count("rdb_changes_since_last_save")
    text = ngettext(
        "%(count)s change since the last one", "%(count)s changes since the last one", changes
    ) % {"count": number(changes)}
    if server.config.get("save") == "":
        return _("none are taken")
    return _("the last one failed") if server.info.get("rdb_last_bgsave_status") == "err" else text


def _append_only(server: ServerInfo) -> str:
    if server.info.get("aof_enabled") != "1":
        return _("off")
    return _("cannot be written") if server.info.get("aof_last_write_status") == "err" else _("is written")


def _replicas(server: ServerInfo, count: Callable[[str], int]) -> str:
    connected = count("connected_slaves")
    if not connected:
        return pgettext("replicas", "none")
    texts = []
    for at in range(connected):
        # slave0:ip=10.0.0.7,port=6379,state=online,offset=14,lag=0
        fields = dict(
            part.split("=", 1) for part in server.info.get(f"slave{at}", "").split(",") if "=" in part
        )
        texts.append(
            f"{fields.get('ip', '?')}:{fields.get('port', '?')} {fields.get('state', '?')}"
            f" ({fields.get('lag', '?')} s)"
        )
    return ", ".join(texts)
