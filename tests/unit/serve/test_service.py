"""The files of deploy/, which run it as a service."""

import configparser
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from tests.served import fake
from vivace.serve.http.access import Keys
from vivace.serve.settings import ServeSettings

DEPLOY = Path(__file__).parents[3] / "deploy"
DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]


def test_the_probe_of_kubernetes_asks_with_the_key(tmp_path: Path) -> None:
    (container,) = POD["containers"]
    command = container["readinessProbe"]["exec"]["command"]
    assert command == container["startupProbe"]["exec"]["command"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez", "the one route without a key"
    key = tmp_path / "key"
    key.write_text("secret\n")
    with fake(tmp_path, api_keys=Keys({"secret": "key 1"})) as server:

        def status(code: str) -> int:
            code = code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").replace(
                "/run/vivace/key", str(key)
            )
            return subprocess.run([sys.executable, *command[1:2], code], capture_output=True).returncode

        assert status(command[2]) == 0
        key.write_text("wrong\n")
        assert status(command[2]) != 0


def test_a_worker_outlives_the_sigterm_that_goes_to_all_processes(tmp_path: Path) -> None:
    with fake(tmp_path) as server:
        with ThreadPoolExecutor(1) as clients:
            drawing = clients.submit(server.draw, "slow 2", seed=5)
            server.wait_for("running", 1)
            process = server.pool.replicas[0]._process
            assert process is not None
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            assert drawing.result().images[0].getpixel((0, 0)) == (5, 0, 0)
        assert server.pool.replicas[0].num_restarts == 0


def test_services_leave_accepted_images_the_time_to_end() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "vivace.service")
    values = unit["Service"]
    graces = [int(values["TimeoutStopSec"]), POD["terminationGracePeriodSeconds"]]
    assert min(graces) > ServeSettings(model="m", recipe="r").timeout_s
    assert values["KillMode"] == "mixed", "SIGTERM goes to the server alone"


def test_a_rollout_on_one_gpu_loses_no_request() -> None:
    assert DEPLOYMENT["spec"]["strategy"]["type"] == "Recreate", "the new pod needs the GPU of the old one"
    (container,) = POD["containers"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > ServeSettings(model="m", recipe="r").timeout_s + pause
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]
