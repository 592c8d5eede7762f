from slime_hpc.types import TensorMeta
from slime_hpc.weight_sync.buckets import buckets, num_bytes


def tensor(name: str, size: int, dtype: str = "uint8") -> TensorMeta:
    return TensorMeta(name, dtype, (size,))


def names(max_bytes: int, *tensors: TensorMeta) -> list[str]:
    return ["".join(t.name for t in bucket) for bucket in buckets(tensors, max_bytes)]


def test_size_counts_the_dtype() -> None:
    assert num_bytes(TensorMeta("w", "bfloat16", (3, 5))) == 30
    assert num_bytes(TensorMeta("w", "float32", ())) == 4


def test_buckets_keep_the_order_and_the_limit() -> None:
    tensors = [tensor("a", 4), tensor("b", 6), tensor("c", 1), tensor("d", 30), tensor("e", 3), tensor("f", 7)]
    assert names(10, *tensors) == ["ab", "c", "d", "ef"]
    assert names(1000, *tensors) == ["abcdef"]
    assert names(1, *tensors) == ["a", "b", "c", "d", "e", "f"]
    assert names(10) == []
