"""Whether all CTAs of a launch fit on the device at once.

Knows nothing of what a kernel does. A launch whose CTAs wait for each other must be resident as a
whole: the driver is asked, with the code's own registers and shared memory.
"""

import re
from dataclasses import dataclass

from tilepipe.kernels.compile import Code

__all__ = ["Residency", "residency_of"]


@dataclass(frozen=True, kw_only=True)
class Residency:
    """How a kernel fills the device."""

    ctas_per_sm: int
    num_sms: int
    num_registers: int  # of a thread
    shared_bytes: int  # of a CTA, static and dynamic
    local_bytes: int  # of a thread: spills and arrays that found no register
    max_clusters: int | None = None  # that run at once; None: CTAs are in none

    @property
    def max_ctas(self) -> int:
        """CTAs that run at once, where CTAs are in no clusters."""
        return self.ctas_per_sm * self.num_sms


def residency_of(
    code: Code, *, num_threads: int, dynamic_bytes: int = 0, cluster_size: int = 1
) -> Residency:
    """Ask the driver about the one kernel of `code`, on the current device."""
    from cuda.bindings import driver

    library = _checked(driver.cuLibraryLoadData(code.cubin, [], [], 0, [], [], 0))
    try:
        name = _entry_name(code.ptx).encode()
        kernel = _checked(driver.cuLibraryGetKernel(library, name))
        function = _checked(driver.cuKernelGetFunction(kernel))
        device = _checked(driver.cuCtxGetDevice())
        attribute, device_attribute = driver.CUfunction_attribute, driver.CUdevice_attribute
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, most, dynamic_bytes))
        per_sm = _checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, num_threads, dynamic_bytes)
        )
        max_clusters = None
        if cluster_size > 1:
            max_clusters = _max_clusters(driver, function, num_threads, dynamic_bytes, cluster_size)
        return Residency(
            max_clusters=max_clusters,
            ctas_per_sm=per_sm,
            num_sms=_checked(
                driver.cuDeviceGetAttribute(
                    device_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device
                )
            ),
            num_registers=_checked(
                driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
            ),
            shared_bytes=dynamic_bytes
            + _checked(
                driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            ),
            local_bytes=_checked(
                driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function)
            ),
        )
    finally:
        driver.cuLibraryUnload(library)


def _max_clusters(driver, function, num_threads: int, dynamic_bytes: int, size: int) -> int:
    """Clusters that the device holds: pairs of SMs may be fewer than half of them."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes = dynamic_bytes
    shape = driver.CUlaunchAttribute()
    shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = size, 1, 1
    config.attrs, config.numAttrs = [shape], 1
    return int(_checked(driver.cuOccupancyMaxActiveClusters(function, config)))


def _entry_name(ptx: str) -> str:
    (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
    return str(name)


def _checked(result):
    """The value of a driver call; raises RuntimeError with the driver's word for a failure."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if values else None
