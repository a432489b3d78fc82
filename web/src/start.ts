import { start } from "./main";
import { report } from "./recorded";
import { show } from "./report";

if (report) {
  show(report);
} else {
  void start();
}
