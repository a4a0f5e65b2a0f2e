"""The tables of names and numbers are those of the installed bindings."""

from __future__ import annotations

import pytest

from faultlab import codes
from faultlab.scenario.words import Wrong, code_of, exception_of, site_of, sticky_of, subject_of
from faultlab.sites import ATTRIBUTES, SITES, Site

driver = pytest.importorskip("cuda.bindings.driver")
pynvml = pytest.importorskip("pynvml")


@pytest.mark.parametrize("name", codes.CUDA)
def test_cuda_codes_are_those_of_the_bindings(name: str) -> None:
    assert int(getattr(driver.CUresult, name)) == codes.CUDA[name]


@pytest.mark.parametrize("name", codes.NVML)
def test_nvml_codes_are_those_of_pynvml(name: str) -> None:
    assert getattr(pynvml, name) == codes.NVML[name]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_are_those_of_the_bindings(name: str) -> None:
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    assert int(attribute) == ATTRIBUTES[name]


def test_every_code_of_a_site_has_a_number() -> None:
    for site in SITES.values():
        table = codes.NVML if site.domain == "nvml" else codes.CUDA
        assert set(site.errors) <= set(table), site.name


def test_every_driver_site_is_a_function_of_the_bindings() -> None:
    # A name in the bindings may carry a version; the seam replaces the plain one.
    absent = [
        site.name for site in SITES.values() if site.domain == "driver" and not hasattr(driver, site.name)
    ]
    assert absent == []


def test_every_nvml_site_is_a_function_of_pynvml() -> None:
    assert all(hasattr(pynvml, site.name) for site in SITES.values() if site.domain == "nvml")


def test_every_cuda_code_but_success_has_a_text() -> None:
    assert set(codes.ERROR_TEXT) == set(codes.CUDA.values())


def test_sticky_codes_have_numbers() -> None:
    assert set(codes.CUDA) >= codes.STICKY


def test_name_of_unknown_number() -> None:
    assert codes.name_of(801) == "CUDA_ERROR_NOT_SUPPORTED"
    assert codes.name_of(3, codes.NVML) == "NVML_ERROR_NOT_SUPPORTED"
    assert codes.name_of(123456) == "code-123456"


# ------------------------------------------------------------- look-ups of words


def test_a_code_by_number_becomes_a_name_of_the_sites_library() -> None:
    assert code_of(SITES["cuMulticastBindMem"], 802) == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert code_of(SITES["nvmlInit"], 999) == "NVML_ERROR_UNKNOWN"


@pytest.mark.parametrize(
    ("site", "code", "message", "hint"),
    [
        (
            "cuMemCreate",
            802,
            "cuMemCreate cannot return CUDA_ERROR_SYSTEM_NOT_READY",
            "it can return CUDA_ERROR_",
        ),
        ("cuMemCreate", 0, "cuMemCreate cannot return CUDA_SUCCESS", "it can return"),
        ("cuMemCreate", 77777, "no code has the number 77777", "it can return"),
        (
            "cuMemCreate",
            "OUT_OF_MEMORY",
            "no code is called 'OUT_OF_MEMORY'",
            "did you mean 'CUDA_ERROR_OUT_OF_MEMORY'?",
        ),
        ("nvmlInit", "CUDA_ERROR_UNKNOWN", "nvmlInit cannot return CUDA_ERROR_UNKNOWN", "NVML_ERROR_UNKNOWN"),
        ("kernel.load", 1, "kernel.load cannot return", "it returns no code; use raise"),
    ],
)
def test_a_code_a_site_cannot_return(site: str, code: str | int, message: str, hint: str) -> None:
    answer = code_of(SITES[site], code)
    assert isinstance(answer, Wrong)
    assert message in answer.message
    assert hint in answer.hint


def test_every_site_can_be_named() -> None:
    for name, site in SITES.items():
        assert site_of(name) is site
    for attribute in ATTRIBUTES:
        assert isinstance(site_of(f"cuDeviceGetAttribute({attribute})"), Site)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("cuMemCraete", "did you mean 'cuMemCreate'?"),
        ("cudaMalloc", "did you mean 'cudart.cudaMalloc'?"),
        ("allgather", "did you mean 'comm.allgather'?"),
        ("cuDeviceGetAttribute(MULTICAST)", "did you mean 'MULTICAST_SUPPORTED'?"),
        (
            "cuDeviceGetAttribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)",
            "did you mean 'MULTICAST_SUPPORTED'?",
        ),
        ("cuMemCreate(1)", "write cuMemCreate"),
        ("zzz", "'faultlab sites' lists them"),
    ],
)
def test_an_unknown_site_comes_with_a_suggestion(text: str, hint: str) -> None:
    answer = site_of(text)
    assert isinstance(answer, Wrong)
    assert answer.hint == hint


@pytest.mark.parametrize("name", ["RuntimeError", "OSError", "MemoryError", "TimeoutError", "AssertionError"])
def test_builtin_exceptions_can_be_raised(name: str) -> None:
    kind = exception_of(name)
    assert isinstance(kind, type)
    assert issubclass(kind, Exception)


@pytest.mark.parametrize(
    "name",
    [
        "KeyboardInterrupt",
        "SystemExit",
        "BaseException",
        "UnicodeDecodeError",
        "int",
        "print",
        "torch.Error",
        "",
    ],
)
def test_what_is_no_plain_exception_cannot_be_raised(name: str) -> None:
    assert isinstance(exception_of(name), Wrong)


def test_sticky_codes() -> None:
    assert sticky_of("CUDA_ERROR_ILLEGAL_ADDRESS") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert isinstance(sticky_of("CUDA_ERROR_INVALID_VALUE"), Wrong)
    assert isinstance(sticky_of("x"), Wrong)


@pytest.mark.parametrize(
    "name",
    [
        "flashinfer",
        "reference",
        "hardened",
        "vllm",
        "sglang",
        "torch-symm-mem",
        "trtllm-contract",
        "canary:no_leak",
        "canary:no_leak-on-destroy",
        "no.such.package:Thing",
    ],
)
def test_subjects_that_can_be_named(name: str) -> None:
    assert subject_of(name) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("refrence", "did you mean 'reference'?"),
        ("canary:no_leek", "did you mean 'no_leak'?"),
        ("canary:", ""),
        ("pkg.mod:", "package.module:callable"),
        ("pkg mod:x", "package.module:callable"),
        ("os.system('x')", "package.module:callable"),
    ],
)
def test_subjects_that_cannot(name: str, hint: str) -> None:
    answer = subject_of(name)
    assert isinstance(answer, Wrong)
    assert hint in answer.hint
