"""The models of a machine: what its probes say and what its calls do.

The two are separate fields because in the field they disagree: attribute 132
says that multicast works, and the call that needs it refuses. An overlay is a
machine state laid over a topology: it replaces single answers of either side.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from faultlab import limits

#: For how many ranks FlashInfer's kernels are built (the switches over the number of ranks in
#: trtllm_mnnvl_allreduce.cuh and trtllm_allreduce_fusion.cuh, 0.7.4).
MNNVL_RANKS: Final = (2, 4, 8, 16, 32, 64)
TRTLLM_RANKS: Final = (2, 4, 8, 16)


class Closed(BaseModel):
    """A model that knows its keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpus(Closed):
    """The GPUs of one node, all alike."""

    count: Annotated[int, Field(ge=1, le=limits.GPUS)]
    model: str
    memory_gib: Annotated[int, Field(ge=1, le=4_096)]
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d$")]


class Links(Closed):
    """How the GPUs of a node reach each other.

    ``nvswitch``: every GPU every other. ``bridge``: NVLink inside each island
    of ``islands`` (ordinals within a node), between islands only ``pcie_p2p``.
    ``pcie``: no NVLink at all.
    """

    kind: Literal["nvswitch", "bridge", "pcie"]
    islands: list[list[int]] = Field(default_factory=list)
    pcie_p2p: bool = True


class Fabric(Closed):
    """What ``nvmlDeviceGetGpuFabricInfoV`` answers (nvml.h): ``state`` 0 not
    supported, 1 not started, 2 in progress, 3 completed; ``status`` an NVML code."""

    state: Annotated[int, Field(ge=0, le=3)]
    status: Annotated[int, Field(ge=0)] = 0
    clique_id: Annotated[int, Field(ge=0)] = 0
    cluster_uuid: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = "0" * 32
    health_mask: Annotated[int, Field(ge=0)] = 0


class Says(Closed):
    """What the probes answer. ``attributes`` by their names in ``cuda.h``
    without the prefix; ``fabric: null`` means NVML answers NOT_SUPPORTED."""

    attributes: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    fabric: Fabric | None = None
    confidential_compute: bool = False


class Does(Closed):
    """What the calls do, whatever the probes say.

    ``multicast``: whether a multicast object can be set up. ``refuses``: calls
    that answer an error of their own, by name. ``fabric_handles``: ``works``,
    or the error of ``cuMemCreate`` for a fabric handle.
    """

    multicast: bool
    refuses: dict[str, str] = Field(default_factory=dict)
    fabric_handles: str = "CUDA_ERROR_NOT_PERMITTED"


class Topology(Closed):
    """A machine: nodes, GPUs, links, and both sides of the truth."""

    name: str
    title: str
    source: str = ""
    overlays: tuple[str, ...] = ()
    nodes: Annotated[int, Field(ge=1, le=limits.GPUS)] = 1
    gpus: Gpus
    links: Links
    says: Says
    does: Does

    @property
    def gpu_count(self) -> int:
        """The GPUs of all nodes."""
        return self.nodes * self.gpus.count

    @property
    def label(self) -> str:
        """The name with its overlays: ``h200-nvl-4.probe-says-yes``."""
        return ".".join((self.name, *self.overlays))

    def node_of(self, gpu: int) -> int:
        """The node of a GPU, both counted over the whole machine from 0."""
        assert 0 <= gpu < self.gpu_count, gpu
        return gpu // self.gpus.count

    def nvlink(self, a: int, b: int) -> bool:
        """Whether NVLink joins two GPUs."""
        if self.node_of(a) != self.node_of(b):
            return False
        if self.links.kind == "nvswitch":
            return True
        if self.links.kind == "pcie":
            return False
        inside = {a % self.gpus.count, b % self.gpus.count}
        return any(inside <= set(island) for island in self.links.islands)

    def reaches(self, a: int, b: int) -> bool:
        """Whether GPU ``a`` can read and write the memory of GPU ``b``."""
        if a == b:
            return True
        if self.node_of(a) != self.node_of(b):
            return False
        return self.nvlink(a, b) or self.links.pcie_p2p

    def rungs(self, ranks: int) -> tuple[str, ...]:
        """The rungs that carry an all-reduce of the first ``ranks`` GPUs on
        this machine when nothing is struck, best first; ``none`` always does."""
        assert 1 <= ranks <= self.gpu_count
        gpus = range(ranks)
        one_node = len({self.node_of(gpu) for gpu in gpus}) == 1
        all_reach = all(self.reaches(a, b) for a in gpus for b in gpus)
        found = []
        multicast = self.does.multicast and not any(
            call.startswith("cuMulticast") for call in self.does.refuses
        )
        says_so = self.says.attributes.get("MULTICAST_SUPPORTED", 0) == 1
        usable = one_node and all_reach
        secret = self.says.confidential_compute
        if usable and multicast and says_so and not secret and ranks in MNNVL_RANKS:
            found.append("mnnvl")
        if usable and ranks in TRTLLM_RANKS:
            found.append("trtllm")
        return (*found, "none")


class Overlay(Closed):
    """A machine state: the single answers that differ from the topology's."""

    name: str
    title: str
    source: str = ""
    attributes: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    fabric: Fabric | None = None
    confidential_compute: bool | None = None
    multicast: bool | None = None
    refuses: dict[str, str] = Field(default_factory=dict)
    fabric_handles: str | None = None

    def laid_over(self, topology: Topology) -> Topology:
        """The topology in this state."""
        says = topology.says
        does = topology.does
        new_says = says.model_copy(
            update={
                "attributes": {**says.attributes, **self.attributes},
                **({"fabric": self.fabric} if self.fabric is not None else {}),
                **(
                    {"confidential_compute": self.confidential_compute}
                    if self.confidential_compute is not None
                    else {}
                ),
            }
        )
        new_does = does.model_copy(
            update={
                "refuses": {**does.refuses, **self.refuses},
                **({"multicast": self.multicast} if self.multicast is not None else {}),
                **({"fabric_handles": self.fabric_handles} if self.fabric_handles is not None else {}),
            }
        )
        return topology.model_copy(
            update={"says": new_says, "does": new_does, "overlays": (*topology.overlays, self.name)}
        )
