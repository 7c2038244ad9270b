from vivace.runtime.memory.footprint import CachingAllocator

KIB, MIB = 2**10, 2**20


def test_a_byte_takes_a_block_of_512() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    assert allocator.allocated == 512
    assert allocator.reserved == 2 * MIB, "small blocks share segments of 2 MiB"
    allocator.allocate(513)
    assert allocator.allocated == 512 + 1024
    assert allocator.reserved == 2 * MIB


def test_a_large_block_is_not_split_for_a_mebibyte_or_less() -> None:
    allocator = CachingAllocator()
    allocator.allocate(25 * MIB)  # a segment of 26 MiB of its own
    assert allocator.allocated == 26 * MIB
    allocator = CachingAllocator()
    allocator.allocate(24 * MIB + 512)  # 26 MiB, and the rest is just over 1 MiB
    assert allocator.allocated == 26 * MIB - (2 * MIB - 512)


def test_blocks_under_ten_mebibytes_share_segments_of_twenty() -> None:
    allocator = CachingAllocator()
    for _ in range(6):
        allocator.allocate(3200 * KIB)
    assert allocator.reserved == 20 * MIB
    assert allocator.allocated == 6 * 3200 * KIB, "1.25 MiB are left, enough to be split off"
    allocator.allocate(3200 * KIB)
    assert allocator.reserved == 40 * MIB


def test_the_best_fitting_free_block_is_taken() -> None:
    allocator = CachingAllocator()
    large, _, medium, _ = (allocator.allocate(size * MIB) for size in (6, 2, 4, 2))
    allocator.free(large)
    allocator.free(medium)
    assert allocator.allocate(4 * MIB).address == medium.address


def test_free_neighbours_become_one() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    assert allocator.allocated == 5 * MIB
    again = allocator.allocate(9 * MIB)
    assert again.address == blocks[1].address
    assert allocator.reserved == 20 * MIB, "nothing new was needed"
    allocator.free(again)
    allocator.free(blocks[0])
    assert allocator.allocated == 0
