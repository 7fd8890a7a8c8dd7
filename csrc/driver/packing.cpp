#define VMM_PACKING_TEXT
#include "driver/packing.h"

extern "C" const char vmm_packing_text[];

namespace vmm::packing {

void run(Step step, const Job& job, Scratch& scratch) {
  for (u64 k = 0; k < job.count; ++k) {
    switch (step) {
      case Step::survey:
        survey_unit(job, k, scratch);
        break;
      case Step::pack:
        pack_unit(job, k, scratch);
        break;
      case Step::unpack:
        unpack_unit(job, k, scratch);
        break;
    }
  }
}

const char* text() { return vmm_packing_text; }

}  // namespace vmm::packing
