"""Paged KV caches: keys and values of many sequences in pages, written by slot and read through page tables."""

from jflex.paged.batch import PagedBatch as PagedBatch
from jflex.paged.batch import check_batch as check_batch
from jflex.paged.batch import debug_check_batch as debug_check_batch
from jflex.paged.cache import PagedCache as PagedCache
from jflex.paged.convert import clear_unused as clear_unused
from jflex.paged.convert import convert_block_mask as convert_block_mask
from jflex.paged.convert import convert_mask_mod as convert_mask_mod
from jflex.paged.convert import convert_score_mod as convert_score_mod
from jflex.paged.errors import DoubleFree as DoubleFree
from jflex.paged.errors import ForeignPage as ForeignPage
from jflex.paged.errors import OutOfPages as OutOfPages
from jflex.paged.errors import PrefixLocked as PrefixLocked
from jflex.paged.errors import StaleHit as StaleHit
from jflex.paged.latent import LatentCache as LatentCache
from jflex.paged.latent import write_latent as write_latent
from jflex.paged.pool import PagePool as PagePool
from jflex.paged.prefix.cache import PrefixCache as PrefixCache
from jflex.paged.prefix.hit import PrefixHit as PrefixHit
from jflex.paged.prefix.hit import PrefixStats as PrefixStats
from jflex.paged.tokens import slots_of as slots_of
from jflex.paged.tokens import token_positions as token_positions
from jflex.paged.tokens import token_requests as token_requests
from jflex.paged.tokens import token_slots as token_slots
from jflex.paged.write import copy_pages as copy_pages
from jflex.paged.write import copy_slots as copy_slots
from jflex.paged.write import write as write
