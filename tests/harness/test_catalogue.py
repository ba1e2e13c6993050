"""The catalogue: names, unknown ones, what a start gets, what a custom harness may say."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.config import CustomHarness
from runner.errors import RunnerError
from runner.harness.catalogue import Catalogue
from runner.harness.spec import LaunchContext
from runner.rules.login import Form


def context(tmp_path: Path, **env: str) -> LaunchContext:
    return LaunchContext(tmp_path / "home", tmp_path / "work", tmp_path / "tmp", env, tmp_path)


def build(tmp_path: Path, environ: dict[str, str] | None = None, **sections: CustomHarness) -> Catalogue:
    own = {"PATH": os.defpath} if environ is None else environ
    return Catalogue.build(sections, tmp_path, base_dir=tmp_path, environ=own)


def script(tmp_path: Path, name: str = "agent.py") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_names_are_the_built_in_ones_and_those_of_the_configuration(tmp_path: Path) -> None:
    catalogue = build(tmp_path, mine=CustomHarness(command=["sh"]))
    assert catalogue.names() == ("claude", "codex", "demo", "mine")


def test_an_unknown_harness_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="claude, codex, demo") as raised:
        build(tmp_path).get("nope")
    assert raised.value.code == "harness_unknown"


def test_a_section_cannot_take_a_built_in_name(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match=r"\[harness\.codex\]") as raised:
        build(tmp_path, codex=CustomHarness(command=["sh"]))
    assert raised.value.code == "invalid_request"


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_what_is_not_installed_is_refused_with_the_command_that_helps(tmp_path: Path, name: str) -> None:
    catalogue = build(tmp_path)
    with pytest.raises(RunnerError, match=f"acp-runner harness install {name}") as raised:
        catalogue.get(name).launch(context(tmp_path))
    assert raised.value.code == "harness_missing"
    found = catalogue.availability(name)
    assert not found.available
    assert found.install_command == f"acp-runner harness install {name}"
    assert "not installed" in (found.reason or "")


def test_another_version_than_the_pinned_one_is_missing(tmp_path: Path) -> None:
    directory = tmp_path / "harnesses" / "codex"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text('{"name":"codex","lock_digest":"old","packages":{}}')
    assert "another version" in (build(tmp_path).availability("codex").reason or "")


def test_an_installation_without_its_program_is_missing(tmp_path: Path) -> None:
    catalogue = build(tmp_path)
    install = catalogue.get("codex").install
    assert install is not None
    directory = tmp_path / "harnesses" / "codex"
    directory.mkdir(parents=True)
    manifest = f'{{"name":"codex","lock_digest":"{install.digest()}","packages":{{}}}}'
    (directory / "manifest.json").write_text(manifest)
    assert "lacks node_modules" in (catalogue.availability("codex").reason or "")


def test_the_environment_is_an_allow_list_and_the_dispatch_comes_last(tmp_path: Path) -> None:
    """The allow-list half of case K1."""
    given = CustomHarness(command=["sh"], env={"MODE": "fast", "BASE": "1"}, pass_env=["MY_KEY", "ABSENT"])
    own = {"PATH": os.defpath, "MY_KEY": "s3cret", "OTHER": "hidden"}
    launch = build(tmp_path, own, mine=given).get("mine").launch(context(tmp_path, MODE="slow", EXTRA="x"))
    assert launch.env == {"MY_KEY": "s3cret", "MODE": "slow", "BASE": "1", "EXTRA": "x"}


def test_secret_values_are_not_in_representations(tmp_path: Path) -> None:
    given = CustomHarness(command=["sh"], pass_env=["MY_KEY"])
    spec = build(tmp_path, {"PATH": os.defpath, "MY_KEY": "s3cret"}, mine=given).get("mine")
    shown = repr((spec, context(tmp_path, KEY="s3cret"), spec.launch(context(tmp_path, KEY="s3cret"))))
    assert "s3cret" not in shown


def test_a_command_is_found_on_the_path(tmp_path: Path) -> None:
    launch = build(tmp_path, mine=CustomHarness(command=["sh", "-c", "x.y"])).get("mine").launch(context(tmp_path))
    assert Path(launch.argv[0]).is_absolute()
    assert launch.argv[1:] == ("-c", "x.y")


def test_python_is_the_runner_s_own_where_the_path_has_none(tmp_path: Path) -> None:
    own = {"PATH": str(tmp_path / "empty")}
    given = CustomHarness(command=["python", "my_agent.py"])
    agent = script(tmp_path, "my_agent.py")
    launch = build(tmp_path, own, mine=given).get("mine").launch(context(tmp_path))
    assert launch.argv == (sys.executable, str(agent))


def test_a_version_manager_s_shim_is_the_last_resort(tmp_path: Path) -> None:
    """It needs the manager, which a cell does not show."""
    shim, program = script(tmp_path, "manager/shims/tool"), script(tmp_path, "bin/tool")
    own = {"PATH": f"{shim.parent}{os.pathsep}{program.parent}"}
    given = CustomHarness(command=["tool"])
    assert build(tmp_path, own, mine=given).get("mine").launch(context(tmp_path)).argv == (str(program),)
    own = {"PATH": str(shim.parent)}
    assert build(tmp_path, own, mine=given).get("mine").launch(context(tmp_path)).argv == (str(shim),)


def test_relative_paths_start_at_the_configuration_file(tmp_path: Path) -> None:
    agent, tool = script(tmp_path, "bin/agent"), script(tmp_path, "tool.py")
    given = CustomHarness(
        command=["bin/agent", "--fast", "tool.py", "absent.py"], read=[Path("data")], write=[Path("/var/out")]
    )
    launch = build(tmp_path, mine=given).get("mine").launch(context(tmp_path))
    assert launch.argv == (str(agent), "--fast", str(tool), "absent.py")
    assert launch.read == (agent, tool, tmp_path / "data")
    assert launch.write == (Path("/var/out"),)


@pytest.mark.parametrize("command", ["no-such-program-here", "bin/absent"])
def test_a_command_that_does_not_exist_is_missing(tmp_path: Path, command: str) -> None:
    catalogue = build(tmp_path, mine=CustomHarness(command=[command]))
    found = catalogue.availability("mine")
    assert not found.available
    assert command in (found.reason or "")
    assert found.install_command is None


def test_the_facet_is_stable_and_changes_with_what_an_agent_gets(tmp_path: Path) -> None:
    base = CustomHarness(command=["sh"])
    facet = build(tmp_path, mine=base).facet("mine")
    assert build(tmp_path, mine=CustomHarness(command=["sh"])).facet("mine") == facet
    changes = [
        CustomHarness(command=["sh", "-x"]),
        CustomHarness(command=["sh"], env={"A": "1"}),
        CustomHarness(command=["sh"], pass_env=["A"]),
        CustomHarness(command=["sh"], read=[Path("/data")]),
        CustomHarness(command=["sh"], write=[Path("/data")]),
    ]
    facets = {build(tmp_path, mine=changed).facet("mine") for changed in changes}
    assert len(facets | {facet}) == len(changes) + 1


def test_built_in_facets_differ(tmp_path: Path) -> None:
    catalogue = build(tmp_path)
    assert len({catalogue.facet(name) for name in catalogue.names()}) == 3


def test_the_demo_agent_runs_isolated_on_this_interpreter(tmp_path: Path) -> None:
    launch = build(tmp_path).get("demo").launch(context(tmp_path))
    assert launch.argv[:3] == (sys.executable, "-I", "-S")
    assert Path(launch.argv[3]).name == "demo_agent.py"
    assert launch.env == {}


def custom(login: Mapping[str, object]) -> CustomHarness:
    return CustomHarness.model_validate({"command": ["true"], "login": login})


def test_a_custom_login_masks_what_a_refresh_spends(tmp_path: Path) -> None:
    given = {"command": ["true"], "file": ".mine/auth.json", "secrets": ["access"], "refresh": "refresh"}
    login = build(tmp_path, mine=custom(given)).get("mine").login
    assert login is not None
    assert login.form == Form(".mine/auth.json", ("access", "refresh"), "refresh")
    for path in ("/etc/passwd", "../auth.json", "a/../../b", ""):
        with pytest.raises(ValueError, match="file"):
            custom(given | {"file": path})


def test_declared_variables() -> None:
    catalogue = Catalogue.build({}, Path("/nowhere"))
    assert catalogue.get("codex").key_vars == ("OPENAI_API_KEY",)
    assert "ANTHROPIC_API_KEY" in catalogue.get("claude").key_vars
    assert "ANTHROPIC_BASE_URL" in catalogue.get("claude").setting_vars
    assert catalogue.get("claude").start_mode == "default"
    for name in catalogue.names():
        login = catalogue.get(name).login
        assert login is not None
        assert login.instructions


def test_a_custom_harness_says_which_keys_stay_outside(tmp_path: Path) -> None:
    """The variables are forwarded by clients like those of the built-in ones; keys of one base URL share a route."""
    given = CustomHarness.model_validate(
        {
            "command": ["sh"],
            "keys": [
                {"key": "A_KEY", "base_url": "A_URL", "upstream": "https://a.example/v1"},
                {"key": "A_TOKEN", "base_url": "A_URL", "upstream": "https://a.example/v1", "header": "x-api-key"},
                {"key": "B_KEY", "base_url": "B_URL", "upstream": "https://b.example"},
            ],
        }
    )
    spec = build(tmp_path, mine=given).get("mine")
    assert (spec.key_vars, spec.setting_vars) == (("A_KEY", "A_TOKEN", "B_KEY"), ("A_URL", "B_URL"))
    assert [(route.name, dict(route.keys), route.base_urls, route.upstream) for route in spec.routes] == [
        ("a_url", {"A_KEY": "bearer", "A_TOKEN": "x-api-key"}, ("A_URL",), "https://a.example/v1"),
        ("b_url", {"B_KEY": "bearer"}, ("B_URL",), "https://b.example"),
    ]


def test_base_urls_of_the_runners_own_environment_are_the_operators(tmp_path: Path) -> None:
    own = {"PATH": os.defpath, "ANTHROPIC_BASE_URL": "https://gateway.example", "ANTHROPIC_API_KEY": "sk-of-the-shell"}
    catalogue = build(tmp_path, own)
    assert catalogue.get("claude").operator == {"ANTHROPIC_BASE_URL": "https://gateway.example"}
    assert catalogue.get("codex").operator == {}
    assert catalogue.facet("claude") == build(tmp_path).facet("claude"), "an agent session is not lost by it"


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_every_key_of_a_built_in_harness_has_a_route(tmp_path: Path, name: str) -> None:
    spec = build(tmp_path).get(name)
    assert {key for route in spec.routes for key in route.keys} == set(spec.key_vars)
    assert {url for route in spec.routes for url in route.base_urls} <= set(spec.setting_vars)
