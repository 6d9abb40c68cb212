"""Does an image fit a facility: built for its devices, with what its network needs."""

from atoll.errors import UserError
from atoll.settings import Run
from atoll.settings.capability import runs_on

# NCCL's own networks (its manual, NCCL_NET); every other name is a plugin's.
OWN_NETWORKS = ("IB", "Socket")


def check_image_fits(run: Run) -> None:
    """Refuse an image whose kernels, or whose NCCL, would not start on the facility's nodes."""
    if run.image.file is None:
        return
    check_capability(run)
    check_plugin(run)


def check_capability(run: Run) -> None:
    """Refuse an image that was built for other devices, where both are stated."""
    device, built_for = run.facility.node.compute_capability, run.image.capabilities
    if device and built_for and not runs_on(device, built_for):
        raise UserError(
            f"image={run.image.name} was built for {', '.join(built_for)}; "
            f"the devices of {run.facility.name} are {device}",
            "an image for them (image=cuda12 has 5.0 to 9.0), or the right "
            "facility.node.compute_capability",
        )


def check_plugin(run: Run) -> None:
    """Refuse NCCL_NET without its plugin: NCCL then stops, and falls back to nothing."""
    network = run.facility.environment.get("NCCL_NET")
    brought = (*OWN_NETWORKS, *run.image.network_plugins)
    known = run.image.args_file is not None  # an image of one's own may bring any
    if network and known and network not in brought and run.facility.network.plugin is None:
        raise UserError(
            f"NCCL_NET={network} is set, and neither image={run.image.name} nor the facility has "
            "that plugin: NCCL stops at its first collective",
            "facility.network.plugin=FILE (libnccl-net.so), or take NCCL_NET out of "
            "facility.environment",
        )
