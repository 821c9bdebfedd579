import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets import device_zoo
from foreplan.datasets.device_name import ISAS, DeviceName
from foreplan.datasets.specs import StrictModel, validate
from foreplan.errors import SpecError


@pytest.mark.parametrize(
    ("text", "canonical", "is_slice"),
    [
        ("cpu", "cpu", False),
        ("CPU:isa=native", "cpu:isa=native", False),
        ("cpu:isa=avx2,threads=1", "cpu:threads=1,isa=avx2", True),
        ("cpu: threads = 4", "cpu:threads=4", True),
        ("cuda", "cuda:0", False),
        ("cuda:3", "cuda:3", False),
        ("cuda:0/sms=32", "cuda:0/sms=32", True),
        ("t4", "t4", False),
        (" Tesla T4 ", "t4", False),
        ("NVIDIA H100 80GB HBM3", "h100_sxm", False),
    ],
)
def test_canonical_form(text: str, canonical: str, is_slice: bool) -> None:
    name = DeviceName.parse(text)
    assert str(name) == canonical
    assert DeviceName.parse(canonical) == name
    assert name.is_slice == is_slice


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cpu:thread=1", "expected a device such as cpu, cpu:threads=1,isa=avx2, cuda:0"),
        ("cpu:", "expected a device such as"),
        ("cpu:threads=1,threads=2", "expected a device such as"),
        ("cpu:threads=0", "threads as a whole number from 1"),
        ("cpu:isa=avx", "isa as one of sse41, avx2"),
        ("cuda:x", "expected a device such as"),
        ("cuda:0/sms=0", "at least one SM"),
        ("gpu:0", "expected a device such as"),
        ("a100", "say which: a100_pcie_40gb"),
        ("h1000", "did you mean 'h100_"),
        ("cpuu", "did you mean 'cpu'?"),
        ("cuda0", "did you mean 'cuda:0'"),
        ("", "`foreplan devices` lists them"),
    ],
)
def test_refuses(text: str, line: str) -> None:
    with pytest.raises(SpecError) as caught:
        DeviceName.parse(text, "c.yaml: devices[0].name")
    assert str(caught.value).startswith(f"c.yaml: devices[0].name: got {text!r}")
    assert line in str(caught.value)


_names = st.one_of(
    st.builds(
        lambda threads, isa: DeviceName("cpu", threads=threads, isa=isa),
        st.none() | st.integers(1, 99999),
        st.none() | st.sampled_from(ISAS),
    ),
    st.builds(
        lambda index, sms: DeviceName("cuda", index=index, sms=sms),
        st.integers(0, 9999),
        st.none() | st.integers(1, 9999),
    ),
    st.sampled_from(device_zoo.names()).map(lambda name: DeviceName("zoo", zoo=name)),
)


@given(_names)
def test_text_reads_back(name: DeviceName) -> None:
    assert DeviceName.parse(str(name)) == name
    assert DeviceName.parse(str(name).upper()) == name


class Spec(StrictModel):
    name: DeviceName


def test_as_a_field() -> None:
    spec = validate(Spec, {"name": "Tesla T4"}, "s")
    assert spec.name == DeviceName.parse("t4")
    assert spec.model_dump(mode="json") == {"name": "t4"}
    assert Spec(name=DeviceName.parse("cpu")).name.kind == "cpu"
    assert Spec.model_json_schema()["properties"]["name"]["type"] == "string"
    with pytest.raises(SpecError, match="s: name: got 'x9', expected a device such as"):
        validate(Spec, {"name": "x9"}, "s")
