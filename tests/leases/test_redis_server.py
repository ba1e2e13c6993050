"""The server that tests of Redis stand on does what they ask of it."""

from __future__ import annotations

import pytest

from tests.redis_server import RedisServer


def test_it_forgets_when_it_is_restarted_and_keeps_its_port(redis_server: RedisServer):
    port, pid = redis_server.port, redis_server.pid
    assert redis_server.command("SET", "k", "v") == b"+OK\r\n"
    redis_server.restart()
    assert redis_server.port == port
    assert redis_server.pid != pid
    assert redis_server.command("GET", "k") == b"$-1\r\n"


def test_it_refuses_connections_once_it_was_killed(redis_server: RedisServer):
    redis_server.kill()
    with pytest.raises(ConnectionRefusedError):
        redis_server.command("PING")


def test_it_is_awake_and_empty_for_the_next_test(redis_server: RedisServer):
    redis_server.command("SET", "k", "v")
    redis_server.stop()
    redis_server.ready()
    assert redis_server.command("DBSIZE") == b":0\r\n"
    redis_server.kill()
    redis_server.ready()
    assert redis_server.command("PING") == b"+PONG\r\n"


def test_a_missing_server_fails_the_test_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.fail.Exception, match="apt-get install redis-server"):
        RedisServer()
