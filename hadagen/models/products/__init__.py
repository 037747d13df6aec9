"""Products of codes: of the codes of rows with the codes of a weight, by the fastest library for their sizes."""

from hadagen.models.products.library import capability, fp8_product, int8_product, multiplies
from hadagen.models.products.operator import multiply_codes
from hadagen.models.products.providers import can_multiply

__all__ = ["can_multiply", "capability", "fp8_product", "int8_product", "multiplies", "multiply_codes"]
