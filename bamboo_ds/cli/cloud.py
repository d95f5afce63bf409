"""`bamboo-ds cloud ...`: prepare a fleet on EC2, begin it and end it. Training itself is `bamboo-ds run`.

::

    bamboo-ds cloud policy           the least IAM policy of the nodes' role
    bamboo-ds cloud launch-template  what a node is and runs, printed, or made with --create
    bamboo-ds cloud up               the first nodes; from then on the job keeps its fleet itself
    bamboo-ds cloud down             end all nodes of a job
    bamboo-ds cloud whoami           what the cloud says of this machine
"""

from __future__ import annotations

import json
import shlex
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from bamboo_ds.cli.options import JOB_NAME, command
from bamboo_ds.cloud.ec2_client import Clients, check_boto3
from bamboo_ds.cloud.ec2_fleet import Ec2Fleet, template_name
from bamboo_ds.cloud.ec2_group import Ec2Group
from bamboo_ds.cloud.fleet import spread
from bamboo_ds.cloud.identity import identify
from bamboo_ds.cloud.launch_template import Machine, create_template, template_data
from bamboo_ds.cloud.metadata import find_metadata
from bamboo_ds.cloud.policy import iam_policy
from bamboo_ds.cloud.port import ANY_ZONE, Holdings, Order, Provider
from bamboo_ds.cloud.user_data import PACKAGES, PYTHON, VENV, Boot, user_data
from bamboo_ds.config.cloud import CloudConfig, load_cloud_config
from bamboo_ds.errors import ConfigError

__all__ = ["cloud"]

cloud = typer.Typer(no_args_is_help=True, help="Prepare a fleet of spot instances, begin it and end it.")

_NODE, _BOOT = "What a node is", "What a node runs"


def _option(text: str, panel: str | None = None, *names: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)
    return found


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """What all commands about a job's fleet need."""

    cloud: Annotated[Path, _option("The fleet's settings: the file of bamboo-ds run --cloud.")]
    job: Annotated[str, _option("Name of the job.")] = "bamboo"

    def config(self) -> CloudConfig:
        """Read the file.

        Raises:
            ConfigError: it cannot be right, or is about no fleet on EC2.
        """
        if not JOB_NAME.fullmatch(self.job):
            raise ConfigError(f"--job {self.job}: must be 1 to 63 letters, digits, '.', '_' or '-'")
        found = load_cloud_config(self.cloud)
        if found.provider != "ec2":
            raise ConfigError(f'{self.cloud}: provider = {found.provider}: this command needs "ec2"')
        check_boto3()
        return found


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(FleetOptions):
    """The options of `bamboo-ds cloud policy`."""

    role: Annotated[str, _option("The nodes' own role, which they hand to the nodes they order.")] = ""
    bucket: Annotated[str, _option("Bucket of the checkpoints, perhaps with a prefix: bucket/prefix.")] = ""


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(FleetOptions):
    """The options of `bamboo-ds cloud launch-template`."""

    etcd: Annotated[str, _option("The etcd servers, as the nodes reach them.", _BOOT)]
    command_: Annotated[str, _option("Script and arguments, in one quoted word.", _BOOT, "--command")]
    options: Annotated[str, _option("More options of bamboo-ds run, in one quoted word.", _BOOT)] = ""
    setup: Annotated[Path | None, _option("Shell commands to run first: fetch script and data.", _BOOT)] = None
    package: Annotated[
        list[str] | None, _option("What pip installs (default: bamboo_ds[aws]); may be repeated.", _BOOT)
    ] = None
    venv: Annotated[str, _option("Virtual environment on the node.", _BOOT)] = VENV
    python: Annotated[str, _option("Python that makes it.", _BOOT)] = PYTHON
    system_packages: Annotated[
        bool, typer.Option("--system-packages", help="It sees the image's own packages.", rich_help_panel=_BOOT)
    ] = False
    image: Annotated[str, _option("AMI: its id, or resolve:ssm:/aws/service/....", _NODE)]
    type_: Annotated[str, _option("Instance type (default: the first of the file).", _NODE, "--type")] = ""
    profile: Annotated[str, _option("Instance profile.", _NODE)] = ""
    security_group: Annotated[list[str] | None, _option("Security group; may be repeated.", _NODE)] = None
    key: Annotated[str, _option("Key pair for ssh.", _NODE)] = ""
    disk_gb: Annotated[int | None, _option("Size of the root volume.", _NODE)] = None
    create: Annotated[bool, typer.Option("--create", help="Make it on EC2, or a new default version of it.")] = False
    user_data: Annotated[bool, typer.Option("--user-data", help="Print the boot script only.")] = False

    def boot(self, config: CloudConfig) -> Boot:
        """Return what a node runs."""
        return Boot(
            job=self.job,
            etcd=self.etcd,
            command=_words("--command", self.command_),
            cloud=config,
            options=_words("--options", self.options),
            packages=self.package or PACKAGES,
            setup=_text("--setup", self.setup),
            venv=self.venv,
            python=self.python,
            system_packages=self.system_packages,
        )

    def machine(self, config: CloudConfig) -> Machine:
        """Return what a node is."""
        return Machine(
            image=self.image,
            type=self.type_ or next(iter(config.ec2.instance_types), ""),
            profile=self.profile,
            security_groups=self.security_group or (),
            key=self.key,
            disk_gb=self.disk_gb,
        )


@dataclass(frozen=True, kw_only=True)
class UpOptions(FleetOptions):
    """The options of `bamboo-ds cloud up`."""

    nodes: Annotated[int, _option("How many nodes there shall be.")] = 1


@dataclass(frozen=True, kw_only=True)
class DownOptions(FleetOptions):
    """The options of `bamboo-ds cloud down`."""

    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False


@dataclass(frozen=True, kw_only=True)
class WhoamiOptions:
    """`bamboo-ds cloud whoami` has none."""


def policy(options: PolicyOptions) -> None:
    """Print the least IAM policy that the role of the nodes needs."""
    found = iam_policy(options.config().ec2, job=options.job, role=options.role, bucket=options.bucket)
    typer.echo(json.dumps(found, indent=2))


def launch_template(options: TemplateOptions) -> None:
    """Print the launch template of the job's nodes, or make it."""
    config = options.config()
    text = user_data(options.boot(config))
    if options.user_data:
        typer.echo(text, nl=False)
        return
    name = config.ec2.launch_template or template_name(options.job)
    data = template_data(options.machine(config), job=options.job, user_data=text)
    if not options.create:
        typer.echo(json.dumps({"LaunchTemplateName": name, "LaunchTemplateData": data}, indent=2))
        return
    version = create_template(data, name=name, clients=Clients(config.ec2.region))
    typer.echo(f"launch template {name}: version {version} is the default now")


def up(options: UpOptions) -> int:
    """Ask for the first nodes of a job; those that are there count. The job keeps its fleet itself from then on."""
    if options.nodes < 1:
        raise ConfigError(f"--nodes {options.nodes}: must be at least 1")
    config = options.config()
    provider = _provider(config, options.job)
    holdings = provider.look()
    there = len(holdings.instances) + sum(holdings.under_way.values())
    granted, wanted = 0, max(options.nodes - there, 0)
    for zone, nodes in _shares(provider, holdings, wanted).items():
        order = Order(f"bamboo-{uuid.uuid4().hex}", nodes, zone, total=there + wanted)
        grant = provider.order(order, again=False)
        granted += grant.nodes
        if grant.trouble is not None:
            typer.echo(f"bamboo-ds cloud up: {grant.trouble}", err=True)
    typer.echo(f"job {options.job}: {there} node(s) were there, {granted} of {wanted} more are granted")
    return 0 if granted == wanted else 1


def down(options: DownOptions) -> None:
    """End all nodes of a job, whatever they do."""
    config = options.config()
    provider = _provider(config, options.job)
    instances = provider.look().instances
    if not options.yes:
        typer.confirm(f"End {len(instances)} node(s) of job {options.job}?", abort=True)
    provider.finish()  # first, or others come in their place
    for instance in instances if config.ec2.group is None else ():
        provider.release(instance.id)
    typer.echo(f"job {options.job}: {len(instances)} node(s) end")


def whoami(options: WhoamiOptions) -> None:
    """Print what the cloud says of this machine."""
    typer.echo(json.dumps(asdict(identify(find_metadata(), deadline_seconds=3.0))))


def _provider(config: CloudConfig, job: str) -> Provider:
    clients = Clients(config.ec2.region)
    return (
        Ec2Group(config.ec2.group, clients=clients)
        if config.ec2.group
        else Ec2Fleet(config.ec2, job=job, clients=clients)
    )


def _shares(provider: Provider, holdings: Holdings, nodes: int) -> dict[str, int]:
    counts = Counter(instance.zone for instance in holdings.instances)
    return spread(nodes, counts=counts, zones=provider.zones or (ANY_ZONE,))


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: cannot be taken apart into words: {error}") from None


def _text(flag: str, path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from None


cloud.command("policy")(command(policy, PolicyOptions, name="cloud policy"))
cloud.command("launch-template")(command(launch_template, TemplateOptions, name="cloud launch-template"))
cloud.command("up")(command(up, UpOptions, name="cloud up"))
cloud.command("down")(command(down, DownOptions, name="cloud down"))
cloud.command("whoami")(command(whoami, WhoamiOptions, name="cloud whoami"))
