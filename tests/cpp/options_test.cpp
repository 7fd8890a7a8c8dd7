#include "core/options.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <variant>
#include <vector>

#include "base/errors.h"

namespace vmm::testing {
namespace {

TEST(ParseBytes, ReadsBytesAndBothKindsOfUnits) {
  EXPECT_EQ(parse_bytes("0"), 0U);
  EXPECT_EQ(parse_bytes("4096"), 4096U);
  EXPECT_EQ(parse_bytes("4096 B"), 4096U);
  EXPECT_EQ(parse_bytes("2MiB"), 2 * kMiB);
  EXPECT_EQ(parse_bytes("2MB"), 2'000'000U);
  EXPECT_EQ(parse_bytes("1.5 GiB"), 3 * kGiB / 2);
  EXPECT_EQ(parse_bytes(".5KiB"), 512U);
  EXPECT_EQ(parse_bytes("1.KiB"), 1024U);
  EXPECT_EQ(parse_bytes("3 tib"), 3 * kTiB);
  EXPECT_EQ(parse_bytes("1PiB"), kTiB * 1024);
  EXPECT_EQ(parse_bytes("1EiB"), std::size_t{1} << 60U);
  EXPECT_EQ(parse_bytes("1EB"), 1'000'000'000'000'000'000U);
  EXPECT_EQ(parse_bytes("9223372036854775807"), (std::size_t{1} << 63U) - 1);
}

TEST(ParseBytes, CaseAndSpaceAreFree) {
  for (const char* text : {"2mib", "2 MIB", " 2\tMiB ", "2 m i b"}) EXPECT_EQ(parse_bytes(text), 2 * kMiB) << text;
}

TEST(ParseBytes, APartOfAByteIsRoundedDownWithAUnitAndRefusedWithout) {
  EXPECT_EQ(parse_bytes("1.3 GiB"), static_cast<std::size_t>(1.3L * 1024 * 1024 * 1024));
  EXPECT_THROW(parse_bytes("1.3"), InvalidArgumentError);
  EXPECT_EQ(parse_bytes("1.0"), 1U);
}

TEST(ParseBytes, RefusesEverythingElseAndShowsTheForm) {
  for (const char* text : {"", " ", ".", "MiB", "2M", "2Mi", "-1", "-2MiB", "+2MiB", "1e3", "0x10", "2 E", "1..5KiB",
                           "1.2.3", "2MiBs", "nan", "inf", "2,5GiB"}) {
    try {
      parse_bytes(text);
      ADD_FAILURE() << "'" << text << "' was read as a size";
    } catch (const InvalidArgumentError& error) {
      EXPECT_NE(std::string(error.what()).find("2MiB"), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(parse_bytes(std::string("2\0b", 3)), InvalidArgumentError) << "a zero byte is no unit";
}

TEST(ParseBytes, ASizeThatIsTooLargeIsCalledSo) {
  for (const char* text : {"9223372036854775808", "9223372036854775807999", "8EiB", "10000PiB", "1ZiB", "1yb"}) {
    try {
      parse_bytes(text);
      ADD_FAILURE() << "'" << text << "' was read as a size";
    } catch (const InvalidArgumentError& error) {
      EXPECT_NE(std::string(error.what()).find("too large"), std::string::npos) << error.what();
    }
  }
  try {
    parse_bytes(std::string(100'000, '9'));
    ADD_FAILURE();
  } catch (const InvalidArgumentError& error) {
    EXPECT_LT(std::string(error.what()).size(), 200U) << "shown in part";
  }
}

class Environment : public ::testing::Test {
 protected:
  void set(const char* name, const char* value) {
    ASSERT_EQ(::setenv(name, value, 1), 0);
    set_.emplace_back(name);
  }
  void TearDown() override {
    for (const std::string& name : set_) ::unsetenv(name.c_str());
  }

 private:
  std::vector<std::string> set_;
};

TEST_F(Environment, DefaultsHoldWhereNothingIsSet) {
  const Options options = Options::from_environment();
  EXPECT_TRUE(options.scrub);
  EXPECT_EQ(options.store_bytes, 256 * kMiB);
  EXPECT_TRUE(options.exportable);
}

TEST_F(Environment, EveryVariableIsRead) {
  set("TORCH_VMM_SCRUB", "off");
  set("TORCH_VMM_STORE_BYTES", "1GiB");
  set("TORCH_VMM_DEFAULT_CAPACITY", "2 TiB");
  set("TORCH_VMM_HOST_BYTES", "8GB");
  set("TORCH_VMM_EXPORTABLE", "false");
  set("TORCH_VMM_DEBUG", "canary,sample=1/100");
  const Options options = Options::from_environment();
  EXPECT_FALSE(options.scrub);
  EXPECT_EQ(options.store_bytes, kGiB);
  EXPECT_EQ(options.default_capacity_bytes, 2 * kTiB);
  EXPECT_EQ(options.host_bytes, 8'000'000'000U);
  EXPECT_FALSE(options.exportable);
  EXPECT_EQ(options.debug.kind, DebugMode::Kind::canary);
  EXPECT_EQ(options.debug.one_in, 100U);
}

TEST_F(Environment, SizesThatCanNotBeAreRefusedByName) {
  const auto said = [&](const char* variable, const char* text) -> std::string {
    set(variable, text);
    try {
      Options::from_environment();
    } catch (const InvalidArgumentError& error) {
      set(variable, "");
      return error.what();
    }
    return "nothing";
  };
  EXPECT_EQ(said("TORCH_VMM_HOST_BYTES", "0"),
            "TORCH_VMM_HOST_BYTES: '0' is no memory at all; set it to nothing for the default, 80 % of RAM");
  EXPECT_EQ(said("TORCH_VMM_HOST_BYTES", "1"),
            "TORCH_VMM_HOST_BYTES: '1' is less than the least, 2 MiB; set it to nothing for the default, 80 % of RAM");
  EXPECT_EQ(said("TORCH_VMM_DEFAULT_CAPACITY", "0 B").substr(0, 27), "TORCH_VMM_DEFAULT_CAPACITY:");
  EXPECT_EQ(
      said("TORCH_VMM_DEFAULT_CAPACITY", "100TiB"),
      "TORCH_VMM_DEFAULT_CAPACITY: '100TiB' is more than the most, 64 TiB; set it to nothing for the default, 4 x "
      "device memory");
  EXPECT_EQ(said("TORCH_VMM_STORE_BYTES", "0"), "nothing");
}

TEST_F(Environment, WhatIsSetToNothingIsNotSet) {
  for (const OptionRow& row : option_table()) set(row.variable, "");
  const Options options = Options::from_environment();
  EXPECT_TRUE(options.scrub);
  EXPECT_EQ(options.store_bytes, 256 * kMiB);
  EXPECT_FALSE(options.debug.is_on());
  set("TORCH_VMM_SCRUBB", "");
  EXPECT_THROW(Options::from_environment(), InvalidArgumentError);
}

TEST(DebugModes, AreReadAndWritten) {
  for (const char* text : {"off", "guard", "canary", "guard,sample=1/100", "canary,sample=1/1000000000"}) {
    EXPECT_EQ(to_string(parse_debug_mode(text)), text);
  }
  EXPECT_EQ(to_string(parse_debug_mode("guard,sample=1/1")), "guard");
  EXPECT_EQ(to_string(DebugMode{}), "off");
}

TEST(DebugModes, AnythingElseIsRefusedAndToldWhatIsRight) {
  for (const char* text : {"",
                           "Off",
                           "off,sample=1/2",
                           "1",
                           "Guard",
                           "guards",
                           "guard,",
                           ",sample=1/2",
                           "guard,sample=",
                           "guard,sample=1/",
                           "guard,sample=100",
                           "guard,sample=2/100",
                           "guard,sample=1/0",
                           "guard,sample=1/-1",
                           "guard,sample=1/1e3",
                           "guard,sample=1/10 ",
                           "guard,sample=1/1000000001",
                           "guard,sample=1/99999999999999999999999",
                           "guard,canary",
                           "guard,sample=1/2,x"}) {
    try {
      parse_debug_mode(text);
      ADD_FAILURE() << text;
    } catch (const InvalidArgumentError& error) {
      EXPECT_NE(std::string(error.what()).find("\"off\", or \"guard\" or \"canary\""), std::string::npos)
          << error.what();
    }
  }
}

TEST_F(Environment, AnUnknownVariableIsAnErrorThatNamesTheKnownOnes) {
  set("TORCH_VMM_SCRUBB", "1");
  try {
    Options::from_environment();
    FAIL();
  } catch (const InvalidArgumentError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("TORCH_VMM_SCRUBB"), std::string::npos);
    for (const OptionRow& row : option_table()) EXPECT_NE(text.find(row.variable), std::string::npos) << row.variable;
  }
}

TEST_F(Environment, AMalformedValueIsAnErrorThatNamesItsForm) {
  set("TORCH_VMM_SCRUB", "maybe");
  EXPECT_THROW(Options::from_environment(), InvalidArgumentError);
  set("TORCH_VMM_SCRUB", "1");
  set("TORCH_VMM_STORE_BYTES", "lots");
  EXPECT_THROW(Options::from_environment(), InvalidArgumentError);
}

TEST(OptionTable, HasNameVariableDefaultUnitAndSentence) {
  for (const OptionRow& row : option_table()) {
    EXPECT_EQ(std::string(row.variable).rfind("TORCH_VMM_", 0), 0U);
    EXPECT_EQ(std::string(row.sentence).back(), '.');
    EXPECT_FALSE(row.default_text().empty() || std::string(row.unit()).empty());
  }
}

TEST(OptionTable, TellsEachDefaultAsItIsWritten) {
  std::vector<std::string> texts;
  for (const OptionRow& row : option_table()) texts.push_back(row.default_text());
  EXPECT_EQ(texts, (std::vector<std::string>{"1", "256MiB", "4 x device memory", "80 % of RAM", "1", "off"}));
}

TEST_F(Environment, ADefaultThatIsSetChangesNothing) {
  const Options defaults;
  for (const OptionRow& row : option_table()) {
    if (const auto* bytes = std::get_if<std::size_t Options::*>(&row.member)) {
      ASSERT_EQ(row.default_words != nullptr, defaults.**bytes == 0) << row.name << ": words are for 0 alone";
    }
    if (row.default_words == nullptr) set(row.variable, row.default_text().c_str());
  }
  const Options options = Options::from_environment();
  EXPECT_EQ(options.scrub, defaults.scrub);
  EXPECT_EQ(options.store_bytes, defaults.store_bytes);
  EXPECT_EQ(options.exportable, defaults.exportable);
  EXPECT_EQ(to_string(options.debug), to_string(defaults.debug));
}

}  // namespace
}  // namespace vmm::testing
