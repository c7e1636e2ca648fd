"""vLLM's command line takes the arguments of the examples for Kubernetes."""

import pytest

from tests.support.examples import vllm_arguments

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


@pytest.mark.parametrize("name", ["vllm.yaml", "sidecar.yaml"])
def test_vllm_serve_takes_the_arguments(name: str) -> None:
    serve = pytest.importorskip("vllm.entrypoints.cli.serve", reason="needs a vLLM build in the environment")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers)
    parsed = parser.parse_args(["serve", *vllm_arguments(name)])  # the image's entry point is `vllm serve`
    assert parsed.model_tag == "Qwen/Qwen2.5-7B-Instruct"
    assert parsed.speculative_config["method"] == "custom_class"
    assert parsed.speculative_config["model"] == "histospec.client.vllm.HistoSpecProposer"
    assert parsed.scheduler_cls == "histospec.client.vllm.HistoSpecScheduler"
