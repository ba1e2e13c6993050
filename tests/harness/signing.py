"""Programs that log in: one at a terminal, one that speaks ACP. Run with the mode and what to store."""

import json
import os
import pathlib
import subprocess
import sys


def store(text: str) -> None:
    file = pathlib.Path(os.environ["HOME"]) / ".mine" / "auth.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    (file.parent / "history").write_text("not to be copied")


def acp(text: str) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"jsonrpc": "2.0", "id": request["id"]}
        print("noise", flush=True)
        if request["method"] == "initialize":
            answer["result"] = {"protocolVersion": 1, "authMethods": [{"id": "browser"}, {"id": "key"}]}
        elif text == "refuse":
            answer["error"] = {"code": -32000, "message": "no such account"}
        elif request["params"]["methodId"] == "key":
            store(json.dumps({"access": os.environ["MY_KEY"]}))
            answer["result"] = {}
        elif text == "wait":
            subprocess.run([os.environ["BROWSER"], "https://login.example/?code=1"], check=True)
            continue
        else:
            store(text)
            answer["result"] = {}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    mode, text = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    if mode == "acp":
        acp(text)
    elif mode == "give-up":
        sys.exit(3)
    elif mode == "forget":
        pass
    else:
        secret = [name for name in os.environ if "SECRET" in name]
        assert not secret, secret
        store(text)
